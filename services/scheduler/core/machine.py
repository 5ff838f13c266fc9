"""The scheduler as a pure machine: messages in, effects out.

The shell feeds every message that is ready through `step`, then calls
`arbitrate` once; both return effects in the order in which they are to happen.
All state is soft: streams that open again rebuild it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from services.scheduler.core import messages as m
from services.scheduler.core.admission.estimate import rejection
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.audit import Audit
from services.scheduler.core.backlog import Backlog
from services.scheduler.core.counters import (
    COMPLETION_ACK,
    ENGINE_REPORT,
    EPOCH_END,
    GRANT_USED,
    LEAVING,
    SECOND_RELEASE,
    TOKENIZER_ACK,
    Counters,
)
from services.scheduler.core.drains import Drains
from services.scheduler.core.fleet import Fleet, Worker
from services.scheduler.core.hopeless import Hopeless
from services.scheduler.core.ledger import Change, Verdict
from services.scheduler.core.lifecycle import Event, State
from services.scheduler.core.roster import Roster
from services.scheduler.core.sharing.arbiter import Arbiter
from services.scheduler.core.sharing.bids import Placement
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.standby import StandBy, of_earlier
from services.scheduler.core.waiting import Unserved, Waiting
from services.scheduler.core.windows import Windows

UNCLAIMED_PAUSE_NS: Final = 500_000_000
"""A worker that handed a grant back unclaimed cannot reach the queue; granting at once again would only spin."""


class Machine:
    """Owns the fleet's ledgers, the backlog, the channels and the arbiter."""

    def __init__(
        self,
        policy: Policy,
        shares: Mapping[str, Share],
        epoch_grace_ns: int,
        started_ns: int,
        sequence_slack: float = 1.0,
        standing_ns: int = 0,
    ) -> None:
        """Start with no worker and no queue.

        `epoch_grace_ns` is how long the credits of a broken stream wait for its worker, and how long after `started_ns`
        nothing is rejected as too large: larger workers may still be on their way back. A grant may stand unused for
        `standing_ns`; 0 gives none.
        """
        self.policy = policy = policy.fresh()
        self.counters = Counters()
        self.fleet = Fleet(sequence_slack, policy.ahead_share, policy.reserve_output_tokens > 0)
        self.queue_connected = False
        self._epoch_grace_ns = epoch_grace_ns
        self._fleet_known_ns = started_ns + epoch_grace_ns
        self._fleet_known = False
        self._hopeless = Hopeless(self.fleet)
        self._fleet_changed = False
        self._came_back: set[str] = set()
        """Requests that wait again: what they waited for may have gone while a worker had them."""
        self._arbiter = Arbiter(policy, self.fleet)
        self._drains = Drains()
        self._stand_by = StandBy(standing_ns, policy, self.fleet, self._arbiter)
        self._roster = Roster(shares, policy.channels_apart, self._arbiter)
        self.backlog = Backlog(self._roster)
        self._waiting = Waiting(self.fleet, policy)
        self._windows = Windows(self.fleet, self._roster.lines_of)
        self._audit = Audit(self.fleet, self.backlog, self._roster.channels)
        self._effects: list[m.Effect] = []
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            m.WorkerOpened: self._worker_opened,
            m.WorkerClosed: self._worker_closed,
            m.WorkerLeaving: self._worker_leaving,
            m.TokenizerAck: self._tokenizer_ack,
            m.GrantUsed: self._grant_used,
            m.CompletionAck: self._completion_ack,
            m.EngineReport: self._engine_report,
            m.QueueOpened: self._queue_opened,
            m.QueueClosed: self._queue_closed,
            m.Announced: self._announced,
            m.Gone: self._gone,
            m.QueueChannels: self._queue_channels_changed,
            m.Reconfigure: self._reconfigure,
            m.DrainRequested: self._drain_requested,
            m.Tick: self._tick,
        }

    def step(self, message: m.Input, now_ns: int) -> list[m.Effect]:
        """Take one message and return what it causes, grants excepted."""
        self._handlers[type(message)](message, now_ns)
        return self._taken_effects()

    def arbitrate(self, now_ns: int) -> list[m.Effect]:
        """Grant everything that fits now."""
        if self._fleet_changed or self._came_back:
            self._review_waiting(now_ns)
        if self.queue_connected:
            self._arbiter.begin(now_ns)
            while (placement := self._arbiter.next()) is not None:
                self._grant(placement, now_ns)
            self._effects.extend(self._stand_by.look(self.backlog, self._roster, now_ns))
        return self._taken_effects()

    @property
    def unfinished(self) -> bool:
        """Whether `arbitrate` is to be called again at once: it has left off so that messages have their turn."""
        return self.queue_connected and self._arbiter.unfinished

    @property
    def shares(self) -> Mapping[str, Share]:
        """The configured share of each channel."""
        return self._roster.shares

    def channel(self, name: str) -> Channel:
        """Return the arbitration channel that requests of channel `name` wait in."""
        return self._roster.channel(name)

    def _taken_effects(self) -> list[m.Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _reconfigure(self, message: m.Reconfigure, _now_ns: int) -> None:
        self._roster.reconfigure(message.shares)

    # ---- grants ----

    def _grant(self, placement: Placement, now_ns: int) -> None:
        entry, worker, blocks = placement.entry, placement.worker, placement.blocks
        request, guaranteed, completions = entry.announced, placement.goes_first, max(entry.announced.n, 1)
        if not worker.ledger.book(
            entry.request_id, request.channel, blocks, completions, guaranteed=guaranteed,
            may_overcommit=guaranteed and worker.displaces, last_attempt=request.last_attempt,
        ):  # fmt: skip
            raise RuntimeError(f"the arbiter placed {entry.request_id} where {blocks} blocks cannot be booked")
        self.policy.booked(worker, request, blocks, now_ns)
        self._move(entry.request_id, Event.BOOKED, now_ns, epoch=worker.epoch)
        self._arbiter.placed(placement)
        self.counters.grants[request.channel] += 1
        self._effects.extend(self._stand_by.came(request, now_ns))
        self._effects.append(
            m.Grant(
                epoch=worker.epoch,
                worker_id=worker.worker_id,
                request_id=entry.request_id,
                channel=request.channel,
                booked_blocks=blocks,
                settles=self.policy.settles,
                attempt=request.attempt,
                traceparent=request.traceparent,
                announced_ns=entry.announced_ns,
                reserve_output_tokens=self.policy.reserve_output_tokens,
                completions=completions,
                guaranteed=guaranteed,
                last_attempt=request.last_attempt,
            )
        )

    def _grant_used(self, used: m.GrantUsed, now_ns: int) -> None:
        worker = self._live(used.stream, used.epoch, GRANT_USED)
        if worker is None:
            return
        if (met := self._stand_by.used(worker, used.grant, used.request)) is None:
            self.counters.unknown[GRANT_USED] += 1
            if used.grant in worker.ledger and used.request.request_id in worker.ledger:
                # Granted again here before this was heard: a new stream's inventory will say which ACKs are whose.
                self._effects.append(m.EndStream(worker.epoch))
                self._end_epoch(worker, now_ns)
            return
        request = met.request
        self._move(request.request_id, Event.ADOPTED, now_ns, epoch=worker.epoch)
        if (known := self.backlog.get(request.request_id)) is not None and known.request is None:
            known.announce(request, now_ns)  # so that a later attempt is known to be one
        self._arbiter.met(worker, request.request_id, self.channel(request.channel), met.booked_blocks, now_ns)
        self.counters.grants[request.channel] += 1
        self.counters.standing_used[request.channel] += 1
        self._effects.append(met)
        self._effects.extend(self._stand_by.came(request, now_ns))

    # ---- the queue ----

    def _queue_opened(self, opened: m.QueueOpened, now_ns: int) -> None:
        self._queue_closed(m.QueueClosed(), now_ns)
        self.queue_connected = True
        self._windows.opened(opened.channels)
        self._effects += self._windows.news()

    def _queue_channels_changed(self, changed: m.QueueChannels, _now_ns: int) -> None:
        if self.queue_connected:
            self._windows.changed(changed.channels)
            self._effects += self._windows.news()

    def _queue_closed(self, _closed: m.QueueClosed, now_ns: int) -> None:
        self.queue_connected = False
        self._windows.closed()
        for entry in self.backlog.entries():
            self._move(entry.request_id, Event.BACKLOG_LOST, now_ns)

    def _announced(self, request: m.Announced, now_ns: int) -> None:
        known = self.backlog.get(request.request_id)
        granted = None if known is None or known.state is State.WAITING else known.request
        newer = granted is not None and request.attempt > granted.attempt
        self._move(request.request_id, Event.REATTEMPTED if newer else Event.ANNOUNCED, now_ns, request)
        self._reject_if_hopeless(request.request_id, now_ns)

    def _gone(self, gone: m.Gone, now_ns: int) -> None:
        self._move(gone.request_id, Event.CLAIMED if gone.reason is m.GoneReason.CLAIMED else Event.ENDED, now_ns)

    def unserved(self) -> Unserved:
        """Return what waits for models that no worker serves."""
        return Unserved(self._roster.channels.values(), self.fleet)

    def waiting_blocks(self) -> dict[tuple[str, str], int]:
        """Ask the lines whose turn it is; return the blocks that what waits is expected to need (`Demand`)."""
        return self._waiting.blocks(self._roster.channels.values())

    def _lines(self) -> list[Line]:
        return [line for channel in self._roster.channels.values() for line in channel.lines.values()]

    # ---- what can never fit ----

    def _reject_if_hopeless(self, request_id: str, now_ns: int) -> None:
        """Reject a waiting request that no worker of the fleet could ever hold, once the fleet is known."""
        entry = self.backlog.get(request_id)
        if not self._fleet_known or entry is None or entry.state is not State.WAITING:
            return
        request = entry.announced
        reject = rejection(request, [group.shape for group in self.fleet.serving(request.model)])
        if reject is not None:
            self._move(request_id, Event.ENDED, now_ns)
            self.counters.rejected[reject.code] += 1
            self._effects.append(reject)

    def _review_waiting(self, now_ns: int) -> None:
        """Look at what may be hopeless now, once for all changes of a wake-up: who waits for some models, or again.

        Before the fleet is known nothing is, and what has changed by then counts from when it is known.
        """
        if not self._fleet_known:
            return
        self._fleet_changed = False
        models = self._hopeless.models_to_review()
        lines = [line for line in self._lines() if line.model in models] if models else []
        for request_id in [entry.request_id for line in lines for entry in line.entries()] + sorted(self._came_back):
            self._reject_if_hopeless(request_id, now_ns)
        self._came_back.clear()

    # ---- workers ----

    def _worker_opened(self, opened: m.WorkerOpened, now_ns: int) -> None:
        before = self.fleet.named(opened.worker_id)
        if before is not None:
            if before.closed_ns is None and before.instance_id != opened.instance_id:
                self._effects.append(m.NameTaken(opened.epoch))
                return
            if before.closed_ns is None:
                self._effects.append(m.EndStream(before.epoch))
            self._arbiter.comes_again(before, opened)
            self._end_epoch(before, now_ns)
        worker = self.fleet.open(opened)
        self._hopeless.opened()
        worker.drain = self._drains.returned(opened)
        self.policy.opened(worker)
        self._arbiter.opened(worker)
        standing = of_earlier(opened.inventory)
        self._effects += (m.Opened(worker.epoch), *(m.Recall(worker.epoch, name) for name in standing))
        for holding in opened.inventory:
            if holding.request_id not in standing:
                self._move(holding.request_id, Event.ADOPTED, now_ns, epoch=worker.epoch)
                self._arbiter.adopted(worker, holding.request_id, self.channel(holding.channel), now_ns)
        if worker.drain != opened.drain:
            self._effects.append(m.TellDrain(worker.epoch, worker.drain))
        if worker.draining:
            self._takes_nothing_new(worker)
        self._fleet_changed = True
        self._effects += self._windows.news()

    def _worker_closed(self, closed: m.WorkerClosed, now_ns: int) -> None:
        worker = self.fleet.get(closed.epoch)
        if worker is not None:
            worker.closed_ns = now_ns
            self._stand_by.closed(worker)
            self._arbiter.went_away()
            self._effects += self._windows.news()

    def _end_epoch(self, worker: Worker, now_ns: int) -> None:
        """Send everything the epoch holds home; what of it was not claimed waits again."""
        self.fleet.remove(worker)
        self._drains.left(worker)
        self._stand_by.closed(worker)
        self._arbiter.ended(worker, now_ns)
        self.policy.ended(worker)
        for request_id, blocks in worker.ledger.drop().items():
            self.counters.refunded(EPOCH_END, blocks)
            self._effects.append(m.Released(worker.epoch, request_id, None, blocks))
            entry = self.backlog.get(request_id)
            if entry is not None and entry.epoch == worker.epoch:
                self._move(request_id, Event.RETURNED, now_ns)

    def _worker_leaving(self, message: m.WorkerLeaving, _now_ns: int) -> None:
        worker = self.fleet.get(message.epoch)
        if worker is None:
            self.counters.stale[LEAVING] += 1
        else:
            worker.leaving = True
            self._takes_nothing_new(worker)

    def _drain_requested(self, request: m.DrainRequested, _now_ns: int) -> None:
        worker = self.fleet.named(request.worker_id)
        if worker is None or worker.drain.wanted == (not request.undo):
            return
        worker.drain = worker.drain.changed()
        self._effects.append(m.TellDrain(worker.epoch, worker.drain))
        if worker.draining:
            self._takes_nothing_new(worker)
        elif worker.closed_ns is None:
            self._arbiter.came_back(worker)

    def _takes_nothing_new(self, worker: Worker) -> None:
        """Let others have the turns of a worker that drains, and want back what it has not claimed."""
        self._arbiter.went_away()
        for request_id in worker.ledger:
            entry = self.backlog.get(request_id)
            if entry is not None and entry.epoch == worker.epoch:
                self._effects.append(m.Recall(worker.epoch, request_id))

    def _engine_report(self, report: m.EngineReport, _now_ns: int) -> None:
        worker = self._live(report.stream, report.epoch, ENGINE_REPORT)
        if worker is not None:
            usable_blocks = worker.usable_blocks
            worker.observe(report)
            if self.policy.reported(worker, report) or worker.usable_blocks > usable_blocks:
                self._arbiter.room_grew(worker)

    def _live(self, stream: int, epoch: int, kind: str) -> Worker | None:
        """Return the worker a message is about; count it as stale if its epoch is over or not its stream's."""
        worker = self.fleet.get(epoch) if stream == epoch else None
        if worker is None:
            self.counters.stale[kind] += 1
        return worker

    # ---- ACKs ----

    def _tokenizer_ack(self, ack: m.TokenizerAck, now_ns: int) -> None:
        worker = self._live(ack.stream, ack.epoch, TOKENIZER_ACK)
        if worker is None:
            return
        if not self.policy.settles:
            self.counters.refused_settles += 1
            return
        grows = self.policy.reserve_output_tokens > 0
        change = worker.ledger.settle(ack.request_id, ack.seq, ack.held_blocks, grows)
        if change.verdict is not Verdict.APPLIED:
            self._absorb(change, TOKENIZER_ACK)
            return
        self.policy.settled(worker, ack, now_ns)
        self.counters.refunded(TOKENIZER_ACK, change.refunded_blocks)
        self._arbiter.settled(worker, ack.request_id, ack.held_blocks, now_ns)
        if change.refunded_blocks > 0 or grows:
            self._arbiter.room_grew(worker)  # one that grows tells how far it has come: less may be expected of it
        self._effects.append(m.Settled(ack.epoch, ack.request_id, ack.held_blocks, change.refunded_blocks))

    def _completion_ack(self, ack: m.CompletionAck, now_ns: int) -> None:
        worker = self._live(ack.stream, ack.epoch, COMPLETION_ACK)
        if worker is None:
            return
        change = worker.ledger.release(ack.request_id, ack.seq)
        if change.verdict is not Verdict.APPLIED:
            self._absorb(change, COMPLETION_ACK)
            return
        self.policy.released(worker, ack)
        self.counters.released(ack, change.refunded_blocks)
        self._effects.append(m.Released(ack.epoch, ack.request_id, ack.cause, change.refunded_blocks))
        if ack.cause is m.ReleaseCause.UNCLAIMED:
            worker.paused_until_ns = now_ns + UNCLAIMED_PAUSE_NS
        self._stand_by.ended(worker, ack.request_id, now_ns)
        self._arbiter.released(worker, ack.request_id, ack.cause, now_ns)
        entry = self.backlog.get(ack.request_id)
        if entry is not None and entry.epoch == ack.epoch:
            self._move(ack.request_id, Event.RETURNED if ack.cause.returned else Event.RELEASED, now_ns)

    def _absorb(self, change: Change, kind: str) -> None:
        """Count an ACK that changed nothing."""
        if change.verdict is Verdict.NO_ROOM:
            self.counters.refused_settles += 1
        elif change.verdict is Verdict.UNKNOWN:
            self.counters.unknown[kind] += 1
        else:
            late_release = change.verdict is Verdict.LATE and kind == COMPLETION_ACK
            self.counters.duplicates[SECOND_RELEASE if late_release else kind] += 1

    # ---- time ----

    def _tick(self, _tick: m.Tick, now_ns: int) -> None:
        over_ns = now_ns - self._epoch_grace_ns
        over = [each for each in self.fleet if each.closed_ns is not None and each.closed_ns <= over_ns]
        for worker in over:
            self._end_epoch(worker, now_ns)
        for request_id in self.backlog.overdue(now_ns):
            self._move(request_id, Event.OVERDUE, now_ns)
        self._effects.extend(self._stand_by.tick(self._roster, now_ns))
        self._fleet_known |= now_ns >= self._fleet_known_ns
        self._fleet_changed |= bool(over)
        self._effects += self._windows.news()
        for whose, violations in self._audit.look(self.channel):
            self.counters.audit_violations += len(violations)
            self._effects.append(m.AuditFailed(whose, violations))

    # ---- the life of a request, by its table ----

    def _move(
        self, request_id: str, event: Event, now_ns: int, request: m.Announced | None = None, epoch: int = 0
    ) -> None:
        """Move the request through its table, as `Backlog.apply` has it, and tell those that this concerns."""
        entry = self.backlog.apply(request_id, event, now_ns, request, epoch)
        if entry is None:
            return
        if event is Event.ENDED and entry.epoch:
            self._effects.append(m.Recall(entry.epoch, request_id))
        elif entry.state is State.WAITING and request is None:
            self._came_back.add(request_id)
