"""Says what is durable, and some things while they are written: effects become frames of Work and Backlog streams, news
for watchers, metrics and spans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.clock import Clock
from services.logs import about
from services.queue import wire
from services.queue.core import effects as fx
from services.queue.core.entry import RequestMeta
from services.queue.core.lifecycle import Outcome
from services.queue.core.machine import Machine
from services.queue.letters import DeadLetters
from services.queue.metrics import QueueMetrics
from services.queue.outlet import Early, Released
from services.queue.storage.store import StoreDamagedError, StoreError
from services.queue.watch.hub import WatchHub
from services.rpc.limits import MAX_UNSENT_BYTES, MAX_UNSENT_PAYLOAD_BYTES
from services.rpc.names import SCHEDULER_TAKEN, name_taken
from services.rpc.outbox import Outbox
from services.telemetry import Attribute, Telemetry

log = logging.getLogger(__name__)

WELL = frozenset({Outcome.COMPLETED, Outcome.CANCELLED})
"""Outcomes that were asked for. Of the others a rejection is the request's own fault: like an HTTP 4xx it has an
`error.type` in its trace, but its span's status is no error."""


@dataclass
class Link:
    """The way out of one Work or Backlog stream."""

    outbox: Outbox = field(default_factory=Outbox)
    code: grpc.StatusCode | None = None
    """Status the stream ends with once the outbox is empty; None for OK."""
    reason: str = ""

    def abandon(self, reason: str) -> None:
        """End the stream of a peer that does not read, and drop what it was to be told."""
        self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self.outbox.discard()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream with a status."""
        if self.code is None:
            self.code, self.reason = code, reason
        self.outbox.close()


@dataclass(frozen=True)
class Greeting:
    """What the first message on a stream tells the peer."""

    store_id: str
    lease_ns: int
    max_inflight: int


class Speaker:
    """The queue's voice. Called by the committer, in order, as each batch is written and when it is durable."""

    def __init__(
        self,
        hub: WatchHub,
        metrics: QueueMetrics,
        telemetry: Telemetry,
        clock: Clock,
        greeting: Greeting,
        read_payload: Callable[[int], bytes | None],
    ) -> None:
        """Speak to no one yet. `read_payload` returns a request as it is stored; it may raise StoreError."""
        self._hub = hub
        self._metrics = metrics
        self._telemetry = telemetry
        self._clock = clock
        self._greeting = greeting
        self._read_payload = read_payload
        self.links: dict[int, Link] = {}
        self.tallies = metrics.tallies.by_channel
        self.letters = DeadLetters()
        self.on_reset: Callable[[], None] = _nothing
        self._payloads: dict[int, bytes] = {}
        self._say: dict[type, Callable[[Any], None]] = {
            fx.Submitted: self._submitted,
            fx.Accepted: self._accepted,
            fx.WorkOpened: self._work_opened,
            fx.Deliver: self._deliver,
            fx.Refused: self._refused,
            fx.StopRun: self._stop_run,
            fx.Recorded: self._recorded,
            fx.TokensWatched: self._tokens_watched,
            fx.BacklogReady: self._backlog_ready,
            fx.ChannelsChanged: self._channels_changed,
            fx.Announce: self._announce,
            fx.Gone: self._gone,
            fx.EndStream: self._end_stream,
            fx.NameTaken: self._name_taken,
            fx.SchedulerTaken: self._scheduler_taken,
            fx.Ended: self._ended,
            fx.LeaseEnded: self._lease_ended,
            fx.WentBack: self._went_back,
            fx.StaleCompletion: self._stale,
            fx.AuditFailed: self._audit_failed,
        }

    # ---- Outlet ----

    def foretell(self, early: Early) -> None:
        """Say what need not wait for its batch to be durable: first to the workers, who are waited for."""
        self._payloads = early.payloads
        for effect in (*early.for_workers, *early.for_scheduler):
            self._say[type(effect)](effect)
        self._payloads = {}

    def release(self, released: Released) -> None:
        """Say what a durable batch says."""
        self._hub.update(released.progress)
        for effect in released.effects:
            say = self._say.get(type(effect))
            if say is not None:
                say(effect)

    def reset(self, machine: Machine) -> None:
        """End every Work and Backlog stream: peers come back and tell what they have."""
        self._metrics.store_failures.inc()
        for link in self.links.values():
            link.end(grpc.StatusCode.UNAVAILABLE, "the queue's store failed; open the stream again")
        self._hub.reset(machine.seal().progress)
        self.on_reset()

    def end_all(self, reason: str) -> None:
        """End every Work and Backlog stream: the service stops."""
        for link in self.links.values():
            link.end(grpc.StatusCode.UNAVAILABLE, reason)

    def observe_commit(self, messages: int, seconds: float) -> None:
        """Note the size and time of one synced batch."""
        self._metrics.commit_messages.observe(messages)
        self._metrics.commit_seconds.observe(seconds)

    # ---- clients ----

    def _submitted(self, effect: fx.Submitted) -> None:
        repeated = sum(1 for _, new in effect.acks if not new) - len(effect.refused)
        if repeated:
            self._metrics.duplicates.inc(repeated)

    def _accepted(self, effect: fx.Accepted) -> None:
        self.tallies[effect.meta.channel].accepted += 1

    def _ended(self, effect: fx.Ended) -> None:
        channel = effect.meta.channel
        tally = self.tallies[channel]
        tally.ended[effect.outcome] += 1
        if effect.body is not None:
            usage = cast(wire.RunResult, effect.body).message.usage
            tally.prompt_tokens += usage.prompt_tokens
            tally.completion_tokens += usage.completion_tokens
        if effect.outcome is Outcome.COMPLETED:  # the others say how long somebody waited before giving up
            self._metrics.e2e_seconds.of(channel).observe((effect.completed_ns - effect.meta.submitted_ns) / 1e9)
        elif effect.outcome is Outcome.DEAD:
            self.letters.note(effect, wire.error_code(effect))
        self._hub.ended(effect.seq, effect.meta.batch_key, effect.request_id, wire.told_result(effect))
        if self._telemetry.enabled:
            if effect.waited_for:
                self._record_wait(
                    effect.request_id, effect.meta, effect.waited_for, effect.meta.submitted_ns, effect.completed_ns
                )
            self._record_end(effect)

    def _record_wait(self, request_id: str, meta: RequestMeta, attempt: int, from_ns: int, to_ns: int) -> None:
        attributes: dict[str, Attribute] = {
            "penstock.request.id": request_id,
            "penstock.channel": meta.channel,
            "penstock.attempt": attempt,
        }
        self._telemetry.record("queue.wait", meta.traceparent, from_ns, to_ns, attributes)

    def _record_end(self, effect: fx.Ended) -> None:
        attributes: dict[str, Attribute] = {
            "penstock.request.id": effect.request_id,
            "penstock.outcome": effect.outcome.name.lower(),
            "penstock.attempt": effect.attempt,
        }
        code = "" if effect.outcome in WELL else wire.error_code(effect)
        if code:
            attributes["error.type"] = code
        self._telemetry.record(
            "queue.complete",
            effect.meta.traceparent,
            effect.completed_ns,
            self._clock.now_ns(),
            attributes,
            "" if effect.outcome is Outcome.REJECTED else code,
        )

    def _lease_ended(self, effect: fx.LeaseEnded) -> None:
        """Say of an attempt what is left of it if its worker was killed before it could export its spans."""
        if self._telemetry.enabled:
            run = cast("wire.RunResult | None", effect.body)
            timings = request_pb2.Timings() if run is None else run.message.timings
            moments = {"first_token": timings.first_token_unix_ns, "last_token": timings.last_token_unix_ns}
            attributes: dict[str, Attribute] = {
                "penstock.request.id": effect.request_id,
                "penstock.channel": effect.meta.channel,
                "penstock.attempt": effect.attempt,
                "penstock.worker.id": effect.worker_id,
                "penstock.lease.end": effect.cause,
            }
            code = ""
            if effect.failure is not None:  # only its code: the message may quote what a client sent
                code = attributes["error.type"] = effect.failure.code or effect.cause
            if effect.last:
                attributes["penstock.attempt.last"] = True
            events = {name: at_ns for name, at_ns in moments.items() if at_ns}
            self._telemetry.record(
                "queue.lease", effect.meta.traceparent, effect.leased_ns, effect.ended_ns, attributes, code, events
            )

    def _went_back(self, effect: fx.WentBack) -> None:
        self._metrics.requeues.labels(effect.channel, effect.cause).inc()

    # ---- workers ----

    def _send(self, stream: int, message: Message | bytes) -> None:
        link = self.links.get(stream)
        if link is not None:
            link.outbox.put(message)
            if link.outbox.size_bytes > MAX_UNSENT_BYTES:
                link.abandon(f"{MAX_UNSENT_BYTES} bytes are unread; open the stream again and read it")

    def _work_opened(self, effect: fx.WorkOpened) -> None:
        greeting = self._greeting
        opened = queue_pb2.WorkOpened(
            lease_ns=greeting.lease_ns,
            store_id=greeting.store_id,
            max_inflight=greeting.max_inflight,
            takes_offers=True,
        )
        self._send(effect.stream, queue_pb2.QueueToWorker(open=opened))

    def _deliver(self, effect: fx.Deliver) -> None:
        if self._telemetry.enabled:
            lease = effect.lease
            self._record_wait(lease.request_id, effect.meta, lease.attempt, effect.submitted_ns, effect.leased_ns)
        link = self.links.get(effect.stream)
        if link is None:
            return
        payload = self._payloads.get(effect.seq)
        if effect.payload is not None:
            # Not in the store yet, so it cannot be read later.
            self._send(effect.stream, wire.deliver(effect, effect.payload))
        elif payload is None or link.outbox.size_bytes > MAX_UNSENT_PAYLOAD_BYTES:
            link.outbox.put_later(partial(self._late_delivery, link, effect))
        else:
            link.outbox.put(wire.deliver(effect, payload))

    def _late_delivery(self, link: Link, effect: fx.Deliver) -> bytes:
        """Return the delivery whose turn has come, or a refusal if there is nothing to deliver.

        Not that the lease is lost: the worker does not know it, and its claim would wait for an answer ever after.
        """
        reason = fx.RefusedReason.ENDED
        name = effect.lease.request_id
        trace = about(name, effect.meta.traceparent)
        try:
            payload = self._read_payload(effect.seq)
        except StoreDamagedError as damage:
            # No worker can run it: its lease runs out, and its attempts with it, and nobody else notices.
            log.error("request %s cannot be delivered: %s", name, damage, extra=trace)
            self._metrics.store_failures.inc()
            payload, reason = None, fx.RefusedReason.UNKNOWN
        except StoreError as error:
            log.error("request %s cannot be delivered now: %s", name, error, extra=trace)
            self._metrics.store_failures.inc()
            link.end(grpc.StatusCode.UNAVAILABLE, f"the queue's store cannot be read: {error}")
            return b""
        if payload is None:
            return self._refusal(fx.Refused(effect.stream, effect.asked_as, reason)).SerializeToString()
        return wire.deliver(effect, payload)

    def _refused(self, effect: fx.Refused) -> None:
        self._send(effect.stream, self._refusal(effect))

    def _refusal(self, effect: fx.Refused) -> queue_pb2.QueueToWorker:
        if effect.reason is not fx.RefusedReason.WITHDRAWN:
            self._metrics.refused_claims.labels(effect.reason.name.lower()).inc()
        reason = cast(queue_pb2.RefusedReason.ValueType, effect.reason.value)
        return queue_pb2.QueueToWorker(refused=queue_pb2.Refused(request_id=effect.request_id, reason=reason))

    def _stop_run(self, effect: fx.StopRun) -> None:
        self._send(effect.stream, _cancel(effect))

    def _recorded(self, effect: fx.Recorded) -> None:
        self._send(effect.stream, wire.recorded(effect))

    def _tokens_watched(self, effect: fx.TokensWatched) -> None:
        watched = queue_pb2.Watched(request_id=effect.request_id, watched=effect.watched)
        self._send(effect.stream, queue_pb2.QueueToWorker(watched=watched))

    def _stale(self, _effect: fx.StaleCompletion) -> None:
        self._metrics.stale.inc()

    def _audit_failed(self, effect: fx.AuditFailed) -> None:
        self._metrics.audit_violations.inc(len(effect.violations))
        for violation in effect.violations:
            log.error("the audit found: %s", violation)

    # ---- the scheduler ----

    def _backlog_ready(self, effect: fx.BacklogReady) -> None:
        greeting = self._greeting
        opened = queue_pb2.BacklogOpen(name="queue", channels=effect.channels, store_id=greeting.store_id)
        self._send(effect.stream, queue_pb2.QueueToScheduler(open=opened))

    def _channels_changed(self, effect: fx.ChannelsChanged) -> None:
        changed = queue_pb2.ChannelsChanged(channels=effect.channels)
        self._send(effect.stream, queue_pb2.QueueToScheduler(channels=changed))

    def _announce(self, effect: fx.Announce) -> None:
        self._send(effect.stream, wire.announce(effect))

    def _gone(self, effect: fx.Gone) -> None:
        self._send(effect.stream, wire.gone(effect))

    def _end_stream(self, effect: fx.EndStream) -> None:
        link = self.links.get(effect.stream)
        if link is not None:
            link.end(grpc.StatusCode.ABORTED, effect.reason)

    def _name_taken(self, effect: fx.NameTaken) -> None:
        link = self.links.get(effect.stream)
        if link is not None:
            link.end(grpc.StatusCode.ALREADY_EXISTS, name_taken(effect.worker_id))

    def _scheduler_taken(self, effect: fx.SchedulerTaken) -> None:
        link = self.links.get(effect.stream)
        if link is not None:
            link.end(grpc.StatusCode.ALREADY_EXISTS, SCHEDULER_TAKEN)


def _cancel(effect: fx.StopRun) -> queue_pb2.QueueToWorker:
    reason = cast(queue_pb2.CancelReason.ValueType, effect.reason.value)
    return queue_pb2.QueueToWorker(cancel=queue_pb2.CancelRun(lease=wire.lease_ref(effect.lease), reason=reason))


def _nothing() -> None:
    """Do nothing on a reset."""
