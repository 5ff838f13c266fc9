"""`/v1/requests/{id}`: the state of any request, and its answer once it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.client import Client
from penstock.errors import PenstockError
from penstock.live.timeline import status_of
from penstock.openai.jsontext import json_bytes
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.doorman import Doorman, authorization_of
from services.gateway.download import Download
from services.gateway.group import Group, body_of_all
from services.gateway.hangup import until_hangup
from services.gateway.lookup import Found, Lookup, pieces_of
from services.gateway.pages import Pages
from services.gateway.problem import of_error, of_result
from services.gateway.reply import LARGE_BYTES, json_of
from services.gateway.vigil import Vigil


class Requests:
    """Serves requests by their ids."""

    def __init__(self, client: Client, pages: Pages, doorman: Doorman, vigil: Vigil) -> None:
        """Ask the queue through `client`. Large answers are held among `pages`, of a tenant whom `doorman` knows.

        `vigil` breaks one off when the client's key is no longer good.
        """
        self._client = client
        self._lookup = Lookup(client, pages)
        self._doorman = doorman
        self._vigil = vigil

    async def get(self, request: Request) -> Response:
        """Return the state of a request, with the response its asker got or will get.

        Raises Problem if that is larger than one answer can be, as it may be of several prompts.
        """
        name = request.path_params["request_id"]
        try:
            who = await self._doorman.let_in(authorization_of(request.scope))
            found = await self._look(request, name, who.tenant, LARGE_BYTES)
            if found.size_bytes < LARGE_BYTES:
                return Response(json_of(described(name, found.each)), media_type="application/json")
            # It is read again when there is room to hold it, for however long its client takes.
            page = self._lookup.page(name, who.tenant, found.size_bytes)
            pieces = pieces_of(page, lambda found: json_bytes(described(name, found)), found.size_bytes)
            return Download(pieces, {"content-type": "application/json"}, self._vigil, lambda: page.line_bytes)
        except PenstockError as error:
            raise of_error(error) from None

    async def delete(self, request: Request) -> JSONResponse:
        """Cancel a request that has not ended, delete the answer of one that has. Raises Problem."""
        name = request.path_params["request_id"]
        try:
            who = await self._doorman.let_in(authorization_of(request.scope))
            deleted = await self._gone(request, name, who.tenant)
        except PenstockError as error:
            raise of_error(error) from None
        return JSONResponse({"id": name, "object": "request.deleted", "deleted": deleted})

    async def _gone(self, request: Request, name: str, tenant: str) -> bool:
        """Delete what has ended, cancel what has not; return whether it had.

        What is cancelled is not looked up before: that may wait for longer than its client does.
        """
        group = Group.named(name)
        if group is None:
            if await self._client.delete(name):
                return True
            if (await self._client.cancel(name)).not_cancelled:  # it is not known, or has ended meanwhile
                await self._look(request, name, tenant, 0)
            return False
        done = await self._client.cancel(batch=group.batch)
        if done.cancelled + done.aborting:
            return False
        found = await self._look(request, name, tenant, 0)
        if not all(one.HasField("result") for one in found.each):
            return False
        return bool(await self._client.delete(*[one.request_id for one in found.each]))

    async def _look(self, request: Request, name: str, tenant: str, most_bytes: float) -> Found:
        """Look a request up for as long as the client is there: its tenant has few turns."""
        async with until_hangup(request.receive):
            return await self._lookup.look(name, tenant, most_bytes)


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
            problem = of_result(result)
            return {"status_code": problem.status, "body": problem.body}
    shape = Shape.from_reference(results[0].client_reference)
    return {"status_code": 200, "body": body_of_all(name, shape, results)}
