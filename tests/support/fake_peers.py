"""A queue and a scheduler for tests of the worker alone: real gRPC, answers chosen by the test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

from penstock.queue.v1 import queue_pb2 as q
from penstock.queue.v1 import queue_pb2_grpc
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from penstock.scheduler.v1 import scheduler_pb2_grpc
from services.rpc.limits import SERVER_OPTIONS
from services.rpc.outbox import Outbox
from tests.support.ports import free_port
from tests.support.waiting import wait_for_async

T = TypeVar("T")


class FakeQueue(queue_pb2_grpc.QueueServiceServicer):
    """Delivers what it was given when it is claimed, and records every completion."""

    def __init__(self) -> None:
        self.requests: dict[str, pb.Request] = {}
        self.watched: set[str] = set()
        self.opens: list[q.WorkOpen] = []
        self.completes: list[q.Complete] = []
        self.tokens: list[pb.TokenDelta] = []
        self.given_back: list[q.LeaseRef] = []
        self.renewed: list[q.LeaseRef] = []
        self.leases: dict[str, q.LeaseRef] = {}
        self.recording = True
        self.lease_ns = 60_000_000_000
        self.name_taken = False
        self.refused = 0
        self._fencing = itertools.count(1)
        self._outbox = Outbox()

    def hang_up(self) -> None:
        """End the stream."""
        self._outbox.close()

    def add(self, request: pb.Request) -> str:
        """Let a request wait to be claimed."""
        self.requests[request.request_id] = request
        return request.request_id

    def send(self, message: q.QueueToWorker) -> None:
        """Send to the worker."""
        self._outbox.put(message)

    def cancel(self, request_id: str, reason: q.CancelReason.ValueType) -> None:
        """Cancel a leased request."""
        self.send(q.QueueToWorker(cancel=q.CancelRun(lease=self.leases[request_id], reason=reason)))

    def result(self, request_id: str) -> pb.Result | None:
        """Return the newest result of a request."""
        found = [c.result for c in self.completes if c.lease.request_id == request_id and c.HasField("result")]
        return found[-1] if found else None

    async def Work(
        self,
        request_iterator: AsyncIterator[q.WorkRequest],
        context: grpc.aio.ServicerContext[q.WorkRequest, q.WorkResponse],
    ) -> AsyncIterator[q.WorkResponse]:
        if self.name_taken:
            self.refused += 1
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "worker_id: another instance of 'w1' is connected")
        outbox = self._outbox = Outbox()

        async def read() -> None:
            try:
                async for frame in request_iterator:
                    for message in frame.messages:
                        self._take(message)
            finally:
                outbox.close()

        reader = asyncio.get_running_loop().create_task(read())
        try:
            async for frame in outbox.frames():
                yield q.WorkResponse.FromString(frame)
        finally:
            reader.cancel()

    def _take(self, message: q.WorkerToQueue) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            self.opens.append(message.open)
            opened = q.WorkOpened(lease_ns=self.lease_ns, store_id="fake", max_inflight=1000)
            self.send(q.QueueToWorker(open=opened))
        elif kind == "claim":
            self._claim(message.claim.request_id)
        elif kind == "complete":
            self.completes.append(message.complete)
            if self.recording:
                self.send(q.QueueToWorker(recorded=q.Recorded(lease=message.complete.lease, accepted=True)))
        elif kind == "tokens":
            self.tokens.append(message.tokens)
        elif kind == "give_back":
            self.given_back.extend(message.give_back.leases)
        elif kind == "renew":
            self.renewed.extend(message.renew.leases)

    def _claim(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            refused = q.Refused(request_id=request_id, reason=q.REFUSED_REASON_ENDED)
            self.send(q.QueueToWorker(refused=refused))
            return
        lease = q.LeaseRef(request_id=request_id, attempt=1, fencing_token=next(self._fencing))
        self.leases[request_id] = lease
        deliver = q.Deliver(lease=lease, request=request, watched=request_id in self.watched)
        self.send(q.QueueToWorker(deliver=deliver))


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Opens streams with growing epochs and keeps what the worker says."""

    def __init__(self) -> None:
        self.opens: list[s.CreditsOpen] = []
        self.settled: list[s.TokenizerAck] = []
        self.released: list[s.CompletionAck] = []
        self.reports: list[s.EngineReport] = []
        self.leaving: list[str] = []
        self.frames: list[s.CreditsRequest] = []
        self.epoch = 0
        self.name_taken = False
        self.refused = 0
        self.listens = asyncio.Event()
        """While it is not set, of a stream no more than what has come is read."""
        self.listens.set()
        self._outbox = Outbox()

    def hang_up(self) -> None:
        """End the stream."""
        self._outbox.close()

    def grant(
        self, request_id: str, blocks: int, settles: bool = True, channel: str = "batch", reserve_output_tokens: int = 0
    ) -> None:
        """Grant a request."""
        grant = s.Grant(
            request_id=request_id, channel=channel, booked_blocks=blocks, settles=settles, attempt=1,
            reserve_output_tokens=reserve_output_tokens,
        )  # fmt: skip
        self._outbox.put(s.SchedulerToWorker(grant=grant))

    def release_of(self, request_id: str) -> s.CompletionAck | None:
        """Return the release of a request."""
        return next((ack for ack in self.released if ack.request_id == request_id), None)

    async def Credits(
        self,
        request_iterator: AsyncIterator[s.CreditsRequest],
        context: grpc.aio.ServicerContext[s.CreditsRequest, s.CreditsResponse],
    ) -> AsyncIterator[s.CreditsResponse]:
        if self.name_taken:
            self.refused += 1
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "worker_id: another instance of 'w1' is connected")
        outbox = self._outbox = Outbox()

        async def read() -> None:
            try:
                async for frame in request_iterator:
                    self.frames.append(frame)
                    for message in frame.messages:
                        self._take(message)
                    await self.listens.wait()
            finally:
                outbox.close()

        reader = asyncio.get_running_loop().create_task(read())
        try:
            async for frame in outbox.frames():
                yield s.CreditsResponse.FromString(frame)
        finally:
            reader.cancel()

    def _take(self, message: s.WorkerToScheduler) -> None:
        kind = message.WhichOneof("message")
        if kind == "open":
            self.opens.append(message.open)
            self.epoch += 1
            opened = s.CreditsOpened(epoch=self.epoch, policy="fake", report_interval_ns=20_000_000)
            self._outbox.put(s.SchedulerToWorker(open=opened))
        elif kind == "tokenizer_ack":
            self.settled.append(message.tokenizer_ack)
        elif kind == "completion_ack":
            self.released.append(message.completion_ack)
        elif kind == "engine_report":
            self.reports.append(message.engine_report)
        elif kind == "leaving":
            self.leaving.append(message.leaving.reason)


class Peers:
    """Both peers, each on a port that survives a stop and a start."""

    def __init__(self) -> None:
        self.queue = FakeQueue()  # type: ignore[abstract]
        self.scheduler = FakeScheduler()  # type: ignore[abstract]
        self.queue_port = free_port()
        self.scheduler_port = free_port()
        self._servers: dict[str, grpc.aio.Server] = {}

    async def start(self) -> None:
        """Start both."""
        await self.start_queue()
        await self.start_scheduler()

    async def start_queue(self) -> None:
        """Start the queue, on the port that is its own."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        queue_pb2_grpc.add_QueueServiceServicer_to_server(self.queue, server)
        server.add_insecure_port(f"127.0.0.1:{self.queue_port}")
        await server.start()
        self._servers["queue"] = server

    async def start_scheduler(self) -> None:
        """Start the scheduler, on the port that is its own."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.scheduler, server)
        server.add_insecure_port(f"127.0.0.1:{self.scheduler_port}")
        await server.start()
        self._servers["scheduler"] = server

    async def stop(self, name: str) -> None:
        """Stop "queue" or "scheduler" at once."""
        await self._servers.pop(name).stop(0)

    async def close(self) -> None:
        """Stop what runs."""
        for name in list(self._servers):
            await self.stop(name)


async def until(fact: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
    """Wait for `fact` to be true and return it; the event loop runs on."""

    async def asked() -> T | None:
        return fact()

    return await wait_for_async(asked, what, timeout_s)
