"""`/v1/requests/{id}`: the state of any request, and its answer once it has ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.client import Client
from penstock.connection import Turn
from penstock.errors import NotFound, PenstockError
from penstock.live.timeline import status_of
from penstock.openai.answers import failure_of
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.doorman import Doorman, authorization_of
from services.gateway.download import Download
from services.gateway.group import Group, body_of_all, check_answers
from services.gateway.hangup import until_hangup
from services.gateway.limits import TELLING
from services.gateway.pages import PLACE_BYTES, Page, Pages, Sheet
from services.gateway.problem import of_error
from services.gateway.reply import LARGE_BYTES, json_of
from services.gateway.vigil import Vigil

LOOK_AHEAD = 16
"""Requests of one body looked up at once, and only after smaller answers than of which so many are a page."""


class Found(NamedTuple):
    """A request, or each of those that one body with several prompts became."""

    each: list[queue_pb2.GetResponse]
    size_bytes: int
    """Of what they were answered, whether or not it was kept."""


class Requests:
    """Serves requests by their ids."""

    def __init__(self, client: Client, pages: Pages, doorman: Doorman, vigil: Vigil) -> None:
        """Ask the queue through `client`. Large answers are held among `pages`, of a tenant whom `doorman` knows.

        `vigil` breaks one off when the client's key is no longer good.
        """
        self._client = client
        self._pages = pages
        self._doorman = doorman
        self._vigil = vigil

    async def get(self, request: Request) -> Response:
        """Return the state of a request, with the response its asker got or will get.

        Raises Problem if that is larger than one answer can be, as it may be of several prompts.
        """
        name = request.path_params["request_id"]
        try:
            who = await self._doorman.let_in(authorization_of(request.scope))
            async with until_hangup(request.receive):
                found = await self._look(name, who.tenant, LARGE_BYTES)
            if found.size_bytes < LARGE_BYTES:
                return Response(json_of(described(name, found.each)), media_type="application/json")
            # It is read again when there is room to hold it, for however long its client takes.
            page = self._page(name, who.tenant, found.size_bytes)
            pieces = _pieces(name, page, found.size_bytes)
            return Download(pieces, {"content-type": "application/json"}, self._vigil, lambda: page.line_bytes)
        except PenstockError as error:
            raise of_error(error) from None

    def _page(self, name: str, tenant: str, size_bytes: int) -> Page[list[queue_pb2.GetResponse]]:
        """Return what has the state of a request, with results of about this size."""

        async def read(_first: int) -> Sheet[list[queue_pb2.GetResponse]]:
            found = await self._found(name, math.inf)
            return Sheet([(1, found.each)], 1, TELLING * found.size_bytes, last=True)

        return Page(self._pages, tenant, read, TELLING * size_bytes)

    async def _look(self, name: str, tenant: str, most_bytes: float) -> Found:
        """Return what `_found` does, in turns of the tenant: only after one is it known how large an answer is."""
        return await self._found(name, most_bytes, partial(self._pages.looking.turn, tenant))

    async def _found(self, name: str, most_bytes: float, turn: Turn = nullcontext) -> Found:
        """Return a request, or each of those that one body with several prompts became, each asked for in a `turn`.

        Of answers that are `most_bytes` or more together only the size is kept. Raises Problem, where they are kept, if
        they are more than one answer can be.
        """
        group = Group.named(name)
        if group is None:
            one = await self._client.wire_get(queue_pb2.GetRequest(request_id=name), turn)
            return _kept(Found([one], one.result.ByteSize()), most_bytes)
        found = Found([], 0)
        at_once = largest_bytes = 1
        while (first := len(found.each)) < group.count:
            at_once = max(1, min(at_once, PLACE_BYTES // largest_bytes))
            try:
                numbers = range(first, min(first + at_once, group.count))
                some = await asyncio.gather(*(self._prompt(group, number, turn) for number in numbers))
            except NotFound:
                raise NotFound(f"request_id: {name!r} is unknown") from None
            sizes_bytes = [one.result.ByteSize() for one in some]
            found = _kept(Found([*found.each, *some], found.size_bytes + sum(sizes_bytes)), most_bytes)
            if most_bytes:
                check_answers(found.size_bytes, group.count)
            largest_bytes = max(largest_bytes, *sizes_bytes)
            at_once = min(2 * at_once, LOOK_AHEAD)
        return found

    async def _prompt(self, group: Group, number: int, turn: Turn) -> queue_pb2.GetResponse:
        """Return the request of one of several prompts."""
        key = queue_pb2.IdempotencyKey(key=group.key(number))
        return await self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key), turn)

    async def delete(self, request: Request) -> JSONResponse:
        """Cancel a request that has not ended, delete the answer of one that has."""
        name = request.path_params["request_id"]
        try:
            who = await self._doorman.let_in(authorization_of(request.scope))
            deleted = await self._gone(name, who.tenant)
        except PenstockError as error:
            raise of_error(error) from None
        return JSONResponse({"id": name, "object": "request.deleted", "deleted": deleted})

    async def _gone(self, name: str, tenant: str) -> bool:
        """Delete what has ended, cancel what has not; return whether it had."""
        if Group.named(name) is None:
            if await self._client.delete(name):
                return True
            await self._look(name, tenant, 0)
            await self._client.cancel(name)
            return False
        found = await self._look(name, tenant, 0)
        ids = [one.request_id for one in found.each]
        if all(one.HasField("result") for one in found.each):
            return bool(await self._client.delete(*ids))
        await self._client.cancel(*ids)
        return False


async def _pieces(name: str, page: Page[list[queue_pb2.GetResponse]], size_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield what a client is told of the state of a request."""
    with page:
        await page.turn()
        async with aclosing(page.pieces(lambda found: json_of(described(name, found)), size_bytes)) as pieces:
            async for piece in pieces:
                yield piece


def _kept(found: Found, most_bytes: float) -> Found:
    """Return it without the answers if they are `most_bytes` or more."""
    return found if found.size_bytes < most_bytes else found._replace(each=[_state_of(one) for one in found.each])


def _state_of(one: queue_pb2.GetResponse) -> queue_pb2.GetResponse:
    """Return a request's id, and whether it has a result."""
    result = pb.Result() if one.HasField("result") else None
    return queue_pb2.GetResponse(request_id=one.request_id, result=result)


def described(name: str, found: Sequence[queue_pb2.GetResponse]) -> dict[str, Any]:
    """Return a request as the gateway shows it; times in Unix seconds.

    The requests of one body with several prompts are shown as one: it has ended when all of them have. Where one got no
    answer the gateway has cancelled the others: the first that ended so is what the asker was told.
    """
    results = [one.result for one in found if one.HasField("result")]
    ended = len(results) == len(found)
    workers = [one.worker_id or one.result.worker_id for one in found]
    return {
        "id": name,
        "object": "request",
        "status": joined_status([status_of(one) for one in sorted(found, key=_when_ended)]),
        "channel": found[0].channel,
        "attempts": max(one.attempts for one in found),
        "worker": next(filter(None, workers), None),
        "created_at": _seconds(min(result.timings.submitted_unix_ns for result in results)) if ended else None,
        "completed_at": _seconds(max(result.timings.completed_unix_ns for result in results)) if ended else None,
        "response": _response(name, results) if ended else None,
    }


def joined_status(statuses: Sequence[str]) -> str:
    """Return the status of a whole whose parts have these."""
    open_ones = {"waiting", "running"}
    if open_ones.isdisjoint(statuses):
        return next((status for status in statuses if status != "completed"), "completed")
    return "waiting" if set(statuses) == {"waiting"} else "running"


def _when_ended(one: queue_pb2.GetResponse) -> int:
    return one.result.timings.completed_unix_ns


def _seconds(unix_ns: int) -> int | None:
    return unix_ns // 1_000_000_000 or None


def _response(name: str, results: Sequence[pb.Result]) -> dict[str, Any]:
    for result in sorted(results, key=lambda result: result.timings.completed_unix_ns):
        if result.outcome != pb.OUTCOME_COMPLETED:
            status, error = failure_of(result)
            return {"status_code": status, "body": {"error": error}}
    shape = Shape.from_reference(results[0].client_reference)
    return {"status_code": 200, "body": body_of_all(name, shape, results)}
