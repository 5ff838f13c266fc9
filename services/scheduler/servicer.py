"""The scheduler's gRPC face: Credits streams, Status, DrainWorker."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from penstock.keys import Role
from penstock.scheduler.v1 import scheduler_pb2
from services.auth.caller import CALLER
from services.auth.deeds import note
from services.auth.keyring import NotAllowedError, Reason
from services.scheduler import wire
from services.scheduler.core import messages as m
from services.scheduler.core.snapshot import WorkerView
from services.scheduler.runner import Runner, WorkerStream

log = logging.getLogger(__name__)

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]

Context = grpc.aio.ServicerContext[Any, Any]

WITHDRAWN_WITHIN_S = 1.0
"""How long a worker that is to drain is waited for to withdraw what stands ready, which takes a round trip over it to
the queue; one that is away does not answer."""


class SchedulerServicer:
    """Implements `penstock.scheduler.v1.SchedulerService`.

    Turns streams into messages for the runner, and the runner's outboxes into streams.
    """

    def __init__(self, runner: Runner) -> None:
        """Serve for `runner`, on whose event loop every call runs."""
        self._runner = runner
        self._instance_id = uuid.uuid4().hex
        self._born_ns = time.monotonic_ns()

    async def Credits(
        self, requests: AsyncIterator[scheduler_pb2.CreditsRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """Serve one epoch of one worker. One reader, one writer, until either side ends the stream."""
        if self._runner.stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is shutting down")
        first = await _first_frame(requests, context)
        try:
            stream = self._runner.open_worker(first.messages[0])
        except wire.InvalidFieldError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reader = asyncio.create_task(self._read(first, requests, stream))
        try:
            async for frame in stream.outbox.frames():
                yield frame
            await self._say_why(stream, reader, context)
        finally:
            reader.cancel()
            self._runner.close_worker(stream)

    async def _read(
        self,
        first: scheduler_pb2.CreditsRequest,
        requests: AsyncIterator[scheduler_pb2.CreditsRequest],
        stream: WorkerStream,
    ) -> None:
        """Feed the runner until the worker closes its half; raises wire.InvalidFieldError at a wrong message."""
        try:
            self._runner.feed([wire.from_worker(message, stream.epoch) for message in first.messages[1:]])
            async for frame in requests:
                self._runner.feed([wire.from_worker(message, stream.epoch) for message in frame.messages])
        finally:
            stream.outbox.close()

    async def _say_why(self, stream: WorkerStream, reader: asyncio.Task[None], context: Context) -> None:
        """End the call with the reason for which its outbox was closed; plainly, if the worker ended it."""
        if stream.code is not None:
            await context.abort(stream.code, stream.reason)
        if not reader.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is shutting down")
        error = reader.exception()
        if isinstance(error, wire.InvalidFieldError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        elif error is not None:
            raise error

    async def Status(self, request: scheduler_pb2.StatusRequest, context: Context) -> scheduler_pb2.StatusResponse:
        """Return the ledger, channels and workers as they are now, or what models are called, which all may know.

        Who waits for a model that nobody serves is told as metrics have it.
        Raises NotAllowedError where a client's key asks for more than that.
        """
        del context
        if request.names_only:
            return wire.names(self._runner.snapshot(), self._up_ns)
        if CALLER.get().role is Role.CLIENT:
            text = "Status needs the role operator or service, or to ask for names_only; the caller's is client"
            raise NotAllowedError(Reason.ROLE, text)
        runner = self._runner
        return wire.status(runner.snapshot(), runner.unserved(), self._instance_id, runner.instances(), self._up_ns)

    @property
    def _up_ns(self) -> int:
        return max(time.monotonic_ns() - self._born_ns, 1)  # 0 is said by one that does not tell

    async def DrainWorker(
        self, request: scheduler_pb2.DrainWorkerRequest, context: Context
    ) -> scheduler_pb2.DrainWorkerResponse:
        """Stop granting to a worker and tell it to finish what it has."""
        view = await self._worker(request.worker_id, context)
        self._runner.feed([m.DrainRequested(request.worker_id)])
        note(log, "worker %s is drained; it still has %d requests", request.worker_id, view.reservations)
        # What stands ready there may still meet a request: that is over when the call is answered.
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWN_WITHIN_S):
                await self._runner.withdrawn(request.worker_id)
        now = {found.worker_id: found.reservations for found in self._runner.snapshot().workers}
        return scheduler_pb2.DrainWorkerResponse(reservations=now.get(request.worker_id, view.reservations))

    async def UndrainWorker(
        self, request: scheduler_pb2.UndrainWorkerRequest, context: Context
    ) -> scheduler_pb2.UndrainWorkerResponse:
        """Let a drained worker have grants again."""
        view = await self._worker(request.worker_id, context)
        if not view.connected:
            # This is the last word on it, and what a worker has not heard a restart of this process forgets.
            text = f"worker_id: {request.worker_id!r} is not connected; undrain it when it is back"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if view.leaving:
            text = f"worker_id: {request.worker_id!r} is stopping, and takes no grants until it is started again"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        self._runner.feed([m.DrainRequested(request.worker_id, undo=True)])
        note(log, "worker %s is drained no more", request.worker_id)
        return scheduler_pb2.UndrainWorkerResponse()

    async def _worker(self, worker_id: str, context: Context) -> WorkerView:
        """Return the view of a worker; ends the call with the names of those there are if it is not one of them."""
        workers = self._runner.snapshot().workers
        for view in workers:
            if view.worker_id == worker_id:
                return view
        known = ", ".join(view.worker_id for view in workers) or "none is connected"
        text = f"worker_id: no worker is called {worker_id!r}; known: {known}"
        return await context.abort(grpc.StatusCode.NOT_FOUND, text)


async def _first_frame(
    requests: AsyncIterator[scheduler_pb2.CreditsRequest], context: Context
) -> scheduler_pb2.CreditsRequest:
    """Return the first frame, which holds at least one message; ends the call if there is none."""
    async for frame in requests:
        if frame.messages:
            return frame
        break
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "open: the first message must be `open`, got nothing")
    raise AssertionError("abort returned")
