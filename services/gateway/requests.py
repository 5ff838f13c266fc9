"""`/v1/requests/{id}`: the state of any request, and its answer once it has ended."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from penstock.client import Client
from penstock.errors import PenstockError
from penstock.live.timeline import status_of
from penstock.openai.answers import body_of, failure_of
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.problem import of_error


class Requests:
    """Serves requests by their ids."""

    def __init__(self, client: Client) -> None:
        """Ask the queue through `client`."""
        self._client = client

    async def get(self, request: Request) -> JSONResponse:
        """Return the state of a request, with the response its asker got or will get."""
        asked = queue_pb2.GetRequest(request_id=request.path_params["request_id"])
        try:
            return JSONResponse(described(await self._client.wire_get(asked)))
        except PenstockError as error:
            raise of_error(error) from None

    async def delete(self, request: Request) -> JSONResponse:
        """Cancel a request that has not ended, delete the answer of one that has."""
        request_id = request.path_params["request_id"]
        try:
            deleted = await self._client.delete(request_id)
            if not deleted:
                await self._client.wire_get(queue_pb2.GetRequest(request_id=request_id))
                await self._client.cancel(request_id)
        except PenstockError as error:
            raise of_error(error) from None
        return JSONResponse({"id": request_id, "object": "request.deleted", "deleted": bool(deleted)})


def described(found: queue_pb2.GetResponse) -> dict[str, Any]:
    """Return a request as the gateway shows it; times in Unix seconds."""
    result = found.result if found.HasField("result") else None
    timings = found.result.timings
    return {
        "id": found.request_id,
        "object": "request",
        "status": status_of(found),
        "channel": found.channel,
        "attempts": found.attempts,
        "worker": found.worker_id or found.result.worker_id or None,
        "created_at": timings.submitted_unix_ns // 1_000_000_000 or None,
        "completed_at": timings.completed_unix_ns // 1_000_000_000 or None,
        "response": None if result is None else _response(result),
    }


def _response(result: pb.Result) -> dict[str, Any]:
    if result.outcome == pb.OUTCOME_COMPLETED:
        return {"status_code": 200, "body": body_of(Shape.from_reference(result.client_reference), result)}
    status, error = failure_of(result)
    return {"status_code": status, "body": {"error": error}}
