"""A scheduler service in memory that answers Status as the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from penstock.scheduler.v1 import scheduler_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2_grpc


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers `statuses` in turn, the last one for ever."""

    def __init__(self, *statuses: pb.StatusResponse) -> None:
        self.statuses = list(statuses) or [pb.StatusResponse(policy="fifo-of-the-test")]
        self.asked = 0

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        self.asked += 1
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        return pb.DrainWorkerResponse(reservations=2)

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Any) -> pb.UndrainWorkerResponse:
        if request.worker_id == "away":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "worker_id: 'away' is not connected")
        return pb.UndrainWorkerResponse()

    async def Credits(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.CreditsResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no worker here")
        yield pb.CreditsResponse()


@asynccontextmanager
async def serving_scheduler(scheduler: FakeScheduler) -> AsyncIterator[str]:
    """Serve `scheduler` on a free port; yield its address."""
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
