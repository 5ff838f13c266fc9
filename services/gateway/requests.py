"""`/v1/requests/{id}`: the state of any request, and its answer once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.client import Client
from penstock.errors import NotFound, PenstockError
from penstock.live.timeline import status_of
from penstock.openai.answers import failure_of
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.doorman import Doorman
from services.gateway.download import Download
from services.gateway.group import Group, body_of_all, check_answers
from services.gateway.limits import TELLING
from services.gateway.pages import Page, Pages, Sheet
from services.gateway.problem import of_error
from services.gateway.reply import LARGE_BYTES, json_of
from services.gateway.vigil import Vigil

LOOK_AHEAD = 16
"""Requests of one body looked up at once."""


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
            found = await self._found(name, answers=True)
            size_bytes = _size_bytes(found)
            if size_bytes < LARGE_BYTES:
                return Response(json_of(described(name, found)), media_type="application/json")
            del found  # it is read again when there is room to hold it, for however long its client takes
            who = await self._doorman.tenant_client()
            page = self._page(name, who.tenant, size_bytes)
            pieces = _pieces(name, page, size_bytes)
            return Download(pieces, {"content-type": "application/json"}, self._vigil, lambda: page.line_bytes)
        except PenstockError as error:
            raise of_error(error) from None

    def _page(self, name: str, tenant: str, size_bytes: int) -> Page[list[queue_pb2.GetResponse]]:
        """Return what has the state of a request, with results of about this size."""

        async def read(_first: int) -> Sheet[list[queue_pb2.GetResponse]]:
            found = await self._found(name, answers=True)
            return Sheet([(1, found)], 1, TELLING * _size_bytes(found), last=True)

        return Page(self._pages, tenant, read, TELLING * size_bytes)

    async def _found(self, name: str, answers: bool) -> list[queue_pb2.GetResponse]:
        """Return the state of a request, or of each of those that one body with several prompts became.

        Without `answers` nothing is kept of what they were answered. Raises Problem.
        """
        group = Group.named(name)
        if group is None:
            return [await self._client.wire_get(queue_pb2.GetRequest(request_id=name))]
        keys = [queue_pb2.IdempotencyKey(key=group.key(number)) for number in range(group.count)]
        found: list[queue_pb2.GetResponse] = []
        size_bytes = 0
        for start in range(0, len(keys), LOOK_AHEAD):
            some = keys[start : start + LOOK_AHEAD]
            gets = (self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key)) for key in some)
            try:
                for one in await asyncio.gather(*gets):
                    size_bytes = check_answers(size_bytes + one.result.ByteSize(), group.count) if answers else 0
                    found.append(one if answers else _state_of(one))
            except NotFound:
                raise NotFound(f"request_id: {name!r} is unknown") from None
        return found

    async def delete(self, request: Request) -> JSONResponse:
        """Cancel a request that has not ended, delete the answer of one that has."""
        name = request.path_params["request_id"]
        try:
            deleted = await self._gone(name)
        except PenstockError as error:
            raise of_error(error) from None
        return JSONResponse({"id": name, "object": "request.deleted", "deleted": deleted})

    async def _gone(self, name: str) -> bool:
        """Delete what has ended, cancel what has not; return whether it had."""
        if Group.named(name) is None:
            if await self._client.delete(name):
                return True
            await self._found(name, answers=False)
            await self._client.cancel(name)
            return False
        found = await self._found(name, answers=False)
        ids = [one.request_id for one in found]
        if all(one.HasField("result") for one in found):
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


def _size_bytes(found: Sequence[queue_pb2.GetResponse]) -> int:
    return sum(one.result.ByteSize() for one in found)


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
