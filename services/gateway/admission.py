"""From an HTTP request to a durable request of the queue, and back out if the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from penstock.client import Client
from penstock.errors import InvalidRequest, PenstockError
from penstock.openai.bodies import BodyError, ChatBody, CompletionBody, parse_body
from penstock.openai.convert import to_request
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb
from services.gateway.extras import Extras
from services.gateway.metrics import GatewayMetrics
from services.gateway.problem import Problem, given_as

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """One generation, understood."""

    body: ChatBody | CompletionBody
    shape: Shape
    request: pb.Request
    keep: bool
    """It goes on if the client goes away."""


def understand(url: str, content: dict[str, Any], extras: Extras, now_ns: int) -> Asked:
    """Return what is asked for by the body of `url` and the headers; raises Problem naming what is wrong."""
    try:
        body = parse_body(url, content, streams=True)
        request = to_request(body)
    except BodyError as error:
        raise Problem(400, str(error), error.param, error.code) from None
    except InvalidRequest as error:
        raise Problem(400, str(error), error.param, error.code) from None
    shape = Shape.of(body)
    extras.put_into(request, now_ns)
    request.client_reference = shape.to_reference()
    return Asked(body, shape, request, extras.keep)


class Admission:
    """Submits and cancels; what a client left behind is cancelled in the background."""

    def __init__(self, client: Client, metrics: GatewayMetrics) -> None:
        """Talk to the queue through `client`."""
        self._client = client
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, asked: Asked) -> str:
        """Return the durable request's id. Raises Problem, or the client's errors.

        If the caller is cancelled meanwhile, the request is cancelled once its id is known, unless it is to be kept.
        """
        submitting = asyncio.create_task(self._client.submit_request(asked.request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._in_background(self._undo(submitting, asked.keep))
            raise
        except InvalidRequest as error:
            name = given_as(error.param)
            raise Problem(400, str(error).replace(error.param, name, 1), name, error.code) from None

    def abandon(self, request_id: str) -> None:
        """Cancel a request whose client has gone."""
        self._in_background(self._cancel(request_id))

    async def settle(self) -> None:
        """Wait until what was abandoned is cancelled."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _undo(self, submitting: asyncio.Task[str], keep: bool) -> None:
        try:
            request_id = await submitting
        except PenstockError:
            return
        if not keep:
            await self._cancel(request_id)

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._client.cancel(request_id)
            self._metrics.cancels.inc()
        except PenstockError as error:
            log.warning("%s goes on without its client: %s", request_id, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
