"""The one loop that owns the machine: everything ready goes in, effects go out to the streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.clock import Clock
from services.logs import about
from services.paced import Paced
from services.rpc.names import name_taken
from services.rpc.outbox import Outbox
from services.scheduler import wire
from services.scheduler.core import messages as m
from services.scheduler.core.machine import Machine
from services.scheduler.core.snapshot import Snapshot, take_snapshot
from services.scheduler.core.standing import PREFIX
from services.scheduler.core.waiting import OTHER_MODELS, Demand, UnservedNames
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.tracing import CreditSpans

TICK_S = 0.2
"""Pause between ticks, which end grace periods and audit the ledgers: short against any grace worth configuring."""

COUNT_NS = 1_000_000_000
"""Between two lines about requests that no worker could ever hold: clients decide how many come. Each request's trace
and result say it too, and a metric counts them."""

log = logging.getLogger("scheduler")


class WorkerStream:
    """The sending half of one Credits stream, and the status with which the scheduler ends it."""

    def __init__(self, epoch: int, worker_id: str) -> None:
        """Make the stream of `epoch` with nothing to send yet."""
        self.epoch = epoch
        self.worker_id = worker_id
        self.outbox = Outbox()
        self.code: grpc.StatusCode | None = None
        self.reason = ""

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with a status."""
        self.code, self.reason = code, reason
        self.outbox.close()


class Runner:
    """Feeds the machine and delivers its effects. Single owner of the machine; one event loop."""

    def __init__(
        self, machine: Machine, clock: Clock, spans: CreditSpans, metrics: SchedulerMetrics, report_interval_ns: int
    ) -> None:
        """Run `machine`; workers are told to report at most every `report_interval_ns`."""
        self._machine = machine
        self._clock = clock
        self._spans = spans
        self._traced = spans.enabled
        self._metrics = metrics
        self._report_interval_ns = report_interval_ns
        self._inbox: list[m.Input] = []
        self._ready = asyncio.Event()
        self._last_epoch = 0
        self._streams: dict[int, WorkerStream] = {}
        self._queue: Outbox | None = None
        self._withdrawing: dict[asyncio.Event, str] = {}
        """Of which worker each awaits that nothing stands ready there any more."""
        self.stopping = False
        self._rejected = Paced(log, logging.INFO, 1, "rejected %d more requests that no worker could ever hold")
        self._counted_ns = 0
        self._unserved_names = UnservedNames()
        self._demand = Demand({}, {})
        self.look()
        self._deliver: dict[type, Callable[[Any], None]] = {
            m.Opened: self._opened,
            m.NameTaken: self._name_taken,
            m.EndStream: self._end_stream,
            m.Grant: self._send_grant,
            m.Met: self._met,
            m.Recall: lambda effect: self._send(effect.epoch, wire.recall(effect)),
            m.TellDrain: lambda effect: self._send(effect.epoch, wire.drain(effect.drain)),
            m.SetWindow: lambda effect: self._send_queue(wire.window(effect)),
            m.RejectRequest: self._send_reject,
            m.Settled: self._spans.settled if self._traced else _tell_nobody,
            m.Released: self._released if self._traced else _tell_nobody,
            m.AuditFailed: _report_audit,
        }

    # ---- used by servicer and links ----

    def workers(self) -> int:
        """Return how many workers are connected."""
        return sum(worker.closed_ns is None for worker in self._machine.fleet)

    def feed(self, messages: Iterable[m.Input]) -> None:
        """Queue messages for the machine, in order."""
        self._inbox.extend(messages)
        self._ready.set()

    def open_worker(self, first: scheduler_pb2.WorkerToScheduler) -> WorkerStream:
        """Start an epoch for a worker's first message; raises wire.InvalidFieldError if the message is wrong.

        Epochs start at the present time, so they stay unique over restarts of the scheduler.
        """
        opened = wire.worker_opened(first, max(self._clock.now_ns(), self._last_epoch + 1))
        self._last_epoch = opened.epoch
        stream = WorkerStream(opened.epoch, opened.worker_id)
        self._streams[opened.epoch] = stream
        self.feed([opened])
        log.info(
            "worker %s opens epoch %d: model %s, %d blocks of %d tokens, %d reservations",
            opened.worker_id,
            opened.epoch,
            opened.models[0],
            opened.shape.capacity_blocks,
            opened.shape.block_size,
            len(opened.inventory),
        )
        return stream

    def close_worker(self, stream: WorkerStream) -> None:
        """Note that a worker's stream has ended."""
        stream.outbox.close()
        if self._streams.pop(stream.epoch, None) is not None:
            self.feed([m.WorkerClosed(stream.epoch)])
            log.info("worker %s: stream of epoch %d ended", stream.worker_id, stream.epoch)

    def open_queue(self, outbox: Outbox) -> None:
        """Send what the queue is to hear through `outbox` from now on."""
        self._queue = outbox

    def close_queue(self) -> None:
        """Note that the Backlog stream has ended."""
        self._queue = None
        self.feed([m.QueueClosed()])

    def snapshot(self) -> Snapshot:
        """Return the machine's state now."""
        return take_snapshot(self._machine)

    def unserved(self) -> dict[str, int]:
        """Return how many requests waited for each model that no worker serves when metrics last looked."""
        return self._demand.unserved

    def instances(self) -> dict[int, str]:
        """Return the name of the process behind each live epoch."""
        return {worker.epoch: worker.instance_id for worker in self._machine.fleet}

    def knows(self, worker_id: str) -> bool:
        """Return whether the worker has a live epoch."""
        return self._machine.fleet.named(worker_id) is not None

    async def withdrawn(self, worker_id: str) -> None:
        """Return once the worker has no grant that may still meet a request, at once if it has none."""
        if not self._stands_ready(worker_id):
            return
        withdrawn = asyncio.Event()
        self._withdrawing[withdrawn] = worker_id
        try:
            await withdrawn.wait()
        finally:
            del self._withdrawing[withdrawn]

    def _stands_ready(self, worker_id: str) -> bool:
        worker = self._machine.fleet.named(worker_id)
        return worker is not None and any(name.startswith(PREFIX) for name in worker.ledger)

    def stop(self) -> None:
        """Grant nothing more and end every worker's stream once it has sent what is queued."""
        self.stopping = True
        self._rejected.count()
        for stream in self._streams.values():
            stream.outbox.close()

    # ---- the loop ----

    async def run(self) -> None:
        """Run until cancelled; an exception is a defect, and the process must not go on with a ledger in doubt."""
        ticker = asyncio.create_task(self._tick())
        ticker.add_done_callback(lambda _: self._ready.set())
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                if ticker.done():
                    ticker.result()  # it ends by a defect only: grace periods and audits would stand still
                self.wake()
                if self._machine.unfinished and not self.stopping:
                    asyncio.get_running_loop().call_soon(self._ready.set)  # not before what streams have to say
        finally:
            ticker.cancel()
            self._spans.stopped(self._clock.now_ns())

    def wake(self) -> None:
        """Feed the machine everything that is ready, arbitrate once, deliver the effects."""
        messages, self._inbox = self._inbox, []
        now_ns = self._clock.now_ns()
        for message in messages:
            self._deliver_all(self._machine.step(message, now_ns))
        if not self.stopping:
            started_s = time.perf_counter()
            grants = self._machine.arbitrate(now_ns)
            self._metrics.arbitration.observe(time.perf_counter() - started_s)
            self._deliver_all(grants)
        if self._withdrawing:
            self._tell_withdrawn()

    def _tell_withdrawn(self) -> None:
        for withdrawn, worker_id in self._withdrawing.items():
            if not self._stands_ready(worker_id):
                withdrawn.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.feed([m.Tick()])
            self.look()

    def look(self) -> None:
        """Take what metrics show from now on, and log each model that begins to be waited for in vain."""
        unserved, new = self._unserved_names.tell(self._machine.unserved(), self._clock.now_ns())
        for model in new:
            log.warning("%d requests wait for %s", unserved[model], _wanted(model))
        if (now_ns := self._clock.now_ns()) - self._counted_ns >= COUNT_NS:
            self._counted_ns = now_ns
            self._rejected.count()
        self._demand = Demand(self._machine.waiting_blocks(), unserved)
        self._metrics.shown = take_snapshot(self._machine), self._demand

    # ---- effects ----

    def _deliver_all(self, effects: list[m.Effect]) -> None:
        for effect in effects:
            self._deliver[type(effect)](effect)

    def _send(self, epoch: int, message: scheduler_pb2.SchedulerToWorker | bytes) -> None:
        stream = self._streams.get(epoch)
        if stream is not None:
            stream.outbox.put(message)

    def _send_queue(self, message: queue_pb2.SchedulerToQueue) -> None:
        if self._queue is not None:
            self._queue.put(message)

    def _send_grant(self, effect: m.Grant) -> None:
        now_ns = self._clock.now_ns()
        if effect.standing is not None:
            self._send(effect.epoch, wire.grant(effect, ""))
            return
        self._metrics.grant_wait.of(effect.channel).observe(max(now_ns - effect.announced_ns, 0) / 1e9)
        traceparent = self._spans.granted(effect, now_ns) if self._traced else effect.traceparent
        self._send(effect.epoch, wire.grant(effect, traceparent))

    def _met(self, effect: m.Met) -> None:
        self._metrics.grant_wait.of(effect.request.channel).observe(0)
        self._spans.met(effect, self._clock.now_ns())

    def _released(self, effect: m.Released) -> None:
        self._spans.released(effect, self._clock.now_ns())

    def _send_reject(self, effect: m.RejectRequest) -> None:
        trace = about(effect.request_id, effect.traceparent)
        self._rejected.say("rejected %s: %s", effect.request_id, effect.message, extra=trace)
        self._send_queue(wire.reject(effect))

    def _opened(self, effect: m.Opened) -> None:
        policy = self._machine.policy.name
        self._send(effect.epoch, wire.credits_opened(effect.epoch, policy, self._report_interval_ns))

    def _name_taken(self, effect: m.NameTaken) -> None:
        stream = self._streams.pop(effect.epoch, None)
        if stream is not None:
            log.warning("worker %s: another instance of this name is connected", stream.worker_id)
            stream.end(grpc.StatusCode.ALREADY_EXISTS, name_taken(stream.worker_id))

    def _end_stream(self, effect: m.EndStream) -> None:
        stream = self._streams.pop(effect.epoch, None)
        if stream is not None:
            text = f"a newer stream of worker {stream.worker_id} has replaced this one"
            stream.end(grpc.StatusCode.ABORTED, text)


def _wanted(model: str) -> str:
    """Return what those wait for whose model no connected worker serves."""
    if not model:
        return "a worker"
    name = "other models" if model == OTHER_MODELS else f"the model {model!r}"
    return f"{name}, which no connected worker serves"


def _tell_nobody(_effect: m.Settled | m.Released) -> None:
    """Only spans are told of what comes home, and there are none while telemetry is off."""


def _report_audit(effect: m.AuditFailed) -> None:
    for violation in effect.violations:
        log.error("the audit found, at %s: %s", effect.worker_id, violation)
