"""The queue as a state machine: `step(message, now_ns)` returns what must be written and said.

Nothing here waits or fails: a refused input has an answer that says so. The
effects of a step are released by the shell only after its writes are on disk, but
for those in `services.queue.outlet.EARLY`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from services.queue.core import records
from services.queue.core.audit import Audit
from services.queue.core.book import Book
from services.queue.core.change import Change, stop_failure
from services.queue.core.effects import (
    Accepted,
    AuditFailed,
    BacklogReady,
    Cancelled,
    Deleted,
    Effect,
    EndStream,
    Inspected,
    LineView,
    QueueView,
    Requeued,
    SchedulerTaken,
    Submitted,
    Write,
    view_of,
)
from services.queue.core.entry import BatchKey, Entry, Failure, Recovered
from services.queue.core.lifecycle import Input, Outcome, State
from services.queue.core.messages import (
    Adopt,
    BacklogClosed,
    BacklogOpened,
    Cancel,
    Claim,
    Complete,
    Delete,
    GiveBack,
    Inspect,
    InspectQueue,
    Message,
    NewRequest,
    Offer,
    Reconfigure,
    Reject,
    Renew,
    RequeueDead,
    SetQuotas,
    SetWindow,
    StoodStill,
    Submit,
    Tick,
    WatchTokens,
    Withdraw,
    WorkerClosed,
    WorkerOpened,
)
from services.queue.core.open_class import mypyc_attr
from services.queue.core.quotas import Quota
from services.queue.core.workers import Rules, Workers

ENDED_AT_ONCE: Final = 1000
"""Requests that one step ends, requeues or revives: some tens of milliseconds in which nothing else is done."""


class Sealed(NamedTuple):
    """What a batch of steps changed, beyond the effects of its steps."""

    counters: Write
    progress: dict[BatchKey, tuple[int, int]]
    """(waiting, running) of every batch that changed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Machine:
    """All decisions of the queue. Owned by one loop; never called from two places at once."""

    def __init__(
        self,
        store_id: str,
        rules: Rules,
        recovered: Recovered,
        now_ns: int,
        quotas: Mapping[str, Quota] = MappingProxyType({}),
    ) -> None:
        """Take over what the store holds; `quotas` are in force until others are set."""
        self.book = Book(store_id, rules.channels, rules.lease_ns, recovered, now_ns, rules.max_attempts)
        self.audit = Audit(self.book)
        self._workers = Workers(self.book, rules)
        self._quotas = quotas
        self._scheduler_id = ""
        """The instance whose Backlog stream was opened last."""
        self._scheduler_serves = False
        """Whether that has workers, as it said last."""
        self._fresh_keys: dict[tuple[str, str], int] = {}
        self._erased: set[int] = set()
        """Requests whose results of before this batch are gone, which a delete of the batch still found in the store.
        """
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            Submit: self._submit,
            SetQuotas: self._set_quotas,
            WorkerOpened: self._workers.worker_opened,
            WorkerClosed: self._workers.worker_closed,
            Claim: self._workers.claim,
            Offer: self._workers.offer,
            Withdraw: self._workers.withdraw,
            Complete: self._workers.complete,
            Renew: self._workers.renew,
            GiveBack: self._workers.give_back,
            BacklogOpened: self._backlog_opened,
            BacklogClosed: self._backlog_closed,
            SetWindow: self._set_window,
            Reject: self._reject,
            Reconfigure: self._reconfigure,
            Cancel: self._cancel,
            Delete: self._delete,
            RequeueDead: self._requeue_dead,
            Inspect: self._inspect,
            InspectQueue: self._inspect_queue,
            WatchTokens: self._workers.watch_tokens,
            Adopt: self._adopt,
            Tick: self._tick,
            StoodStill: self._workers.stood_still,
        }

    def step(self, message: Message, now_ns: int) -> list[Effect]:
        """Take one message and return what follows from it."""
        self._handlers[type(message)](message, now_ns)
        return self.book.take_effects()

    def seal(self) -> Sealed:
        """End a batch of steps: what follows is looked up in the store, no longer here."""
        book = self.book
        self._fresh_keys.clear()
        self._erased.clear()
        progress = {}
        for batch in book.changed_batches:
            running = book.leased_by_batch.get(batch, 0)
            progress[batch] = (len(book.batches.get(batch, ())) - running, running)
        book.changed_batches.clear()
        return Sealed(Write(records.META, records.COUNTERS_KEY, records.encode_counters(book.counters)), progress)

    def runs(self, request_id: str, attempt: int) -> Entry | None:
        """Return the request if it is leased in this attempt, else None."""
        entry = self.book.find(request_id)
        if entry is None or entry.seq not in self.book.leases or entry.attempt != attempt:
            return None
        return entry

    def end(self) -> None:
        """Never be asked again. What is known is let go of with the last who knows this machine, not by the collector.

        That looks at what lives long once in hours, and at what was loaded never.
        """
        self._handlers.clear()  # they know the machine that knows them
        self.book.end()

    def _adopt(self, message: Adopt, now_ns: int) -> None:
        for entry in message.entries:
            self.book.adopt(entry, now_ns)

    # ---- clients ----

    def _submit(self, message: Submit, now_ns: int) -> None:
        if message.together and (failure := self._refusal(message.requests)) is not None:
            count = len(message.requests)
            self.book.emit(Submitted(message.ticket, (("", False),) * count, dict.fromkeys(range(count), failure)))
            return
        acks: list[tuple[str, bool]] = []
        refused: dict[int, Failure] = {}
        for place, new in enumerate(message.requests):
            failure = None if message.together else self._refusal((new,))
            if failure is not None:
                refused[place] = failure
            acks.append(self._add(new, now_ns) if failure is None else ("", False))
        self.book.emit(Submitted(message.ticket, tuple(acks), refused))

    def _set_quotas(self, message: SetQuotas, _now_ns: int) -> None:
        self._quotas = message.quotas

    def _refusal(self, requests: Sequence[NewRequest]) -> Failure | None:
        """Return why a quota does not let these requests in, or None; those known already take nothing of it."""
        if not any(new.meta.tenant in self._quotas for new in requests):
            return None
        return self.book.waiting.refusal([new.meta for new in requests if self._known(new) is None], self._quotas)

    def _known(self, new: NewRequest) -> int | None:
        """Return the request that has this one's idempotency key already."""
        if new.known_seq is not None or not new.meta.idempotency_key:
            return new.known_seq
        return self._fresh_keys.get((new.meta.tenant, new.meta.idempotency_key))

    def _add(self, new: NewRequest, now_ns: int) -> tuple[str, bool]:
        known = self._known(new)
        if known is not None:
            return self.book.name_of(known), False
        entry = self.book.add(new.meta, new.payload, now_ns)
        if new.meta.idempotency_key:
            self._fresh_keys[new.meta.tenant, new.meta.idempotency_key] = entry.seq
        self.book.emit(Accepted(entry.name, entry.meta))
        self._workers.meet_offer(entry, new.payload, now_ns)
        return entry.name, True

    def _cancel(self, message: Cancel, now_ns: int) -> None:
        """Cancel by name, or the first of a batch: a step that ended a large one would keep everybody else waiting."""
        cancelled = aborting = 0
        unknown: list[str] = []
        left: tuple[int, ...] = ()
        names = message.request_ids
        if names is None:
            seqs = tuple(sorted(self.book.batches.get(message.batch, ())))
            names = tuple(map(self.book.name_of, seqs[:ENDED_AT_ONCE]))
            left = seqs[ENDED_AT_ONCE:]
        for request_id in names:
            entry = self._seen(request_id, message.sees)
            if entry is None or not self._stop(entry, Input.CANCEL, Outcome.CANCELLED, now_ns):
                unknown.append(request_id)
            elif entry.state is State.DONE:
                cancelled += 1
            else:
                aborting += 1
        self.book.emit(Cancelled(message.ticket, cancelled, aborting, tuple(unknown), left))

    def _seen(self, request_id: str, sees: str | None) -> Entry | None:
        """Return a live request, unless it belongs to another than the only tenant the caller sees."""
        entry = self.book.find(request_id)
        return entry if entry is None or sees is None or entry.meta.tenant == sees else None

    def _stop(self, entry: Entry, event: Input, outcome: Outcome, now_ns: int) -> bool:
        stream = self._workers.stream_of(entry)
        return self.book.apply(entry, Change(event, now_ns, outcome, stop_failure(outcome), stream=stream))

    def _delete(self, message: Delete, now_ns: int) -> None:
        deleted = 0
        for row in message.rows:
            if row.seq in self._erased:
                continue
            entry = self.book.entries.get(row.seq)
            if entry is not None and not self.book.apply(entry, Change(Input.DELETE, now_ns)):
                continue  # a request that lives has no result
            key = records.seq_key(row.seq)
            self._erase(records.RESULTS, key)
            self._erase(records.COMPLETIONS, records.completion_key((row.tenant, row.batch), row.completion_seq))
            self._erase(records.EXPIRY, records.expiry_key(row.completed_ns, row.seq))
            if row.idempotency_key:
                self._erase(records.IDEMPOTENCY, records.idempotency_key(row.tenant, row.idempotency_key))
            self.book.counters.results -= 1
            self._erased.add(row.seq)
            deleted += 1
        self.book.emit(Deleted(message.ticket, deleted))

    def _erase(self, family: str, key: bytes) -> None:
        self.book.emit(Write(family, key, None))

    def _requeue_dead(self, message: RequeueDead, now_ns: int) -> None:
        """Revive by name, or the first of all there are, as `_cancel` does."""
        names = message.request_ids
        left: tuple[int, ...] = ()
        if names is None:
            entries = self.book.entries
            seqs = tuple(sorted([seq for seq in self.book.dead if entries[seq].completion_seq <= message.up_to]))
            names = tuple(map(self.book.name_of, seqs[:ENDED_AT_ONCE]))
            left = seqs[ENDED_AT_ONCE:]
        not_dead = []
        for request_id in names:
            entry = self.book.find(request_id)
            if entry is None or entry.completion_seq > message.up_to:
                not_dead.append(request_id)  # or has died again since whoever asks looked
            elif not self.book.apply(entry, Change(Input.REQUEUE, now_ns)):
                not_dead.append(request_id)
            else:
                self._erased.add(entry.seq)
        self.book.emit(Requeued(message.ticket, len(names) - len(not_dead), tuple(not_dead), left))

    def _inspect(self, message: Inspect, _now_ns: int) -> None:
        found = [(request_id, self._seen(request_id, message.sees)) for request_id in message.request_ids]
        views = tuple(view_of(entry, request_id) if entry else None for request_id, entry in found)
        self.book.emit(Inspected(message.ticket, views))

    def _inspect_queue(self, message: InspectQueue, _now_ns: int) -> None:
        self.book.emit(self.overview(message.ticket))

    def overview(self, ticket: int = 0) -> QueueView:
        """Return the counts of the queue."""
        book = self.book
        lines = []
        for channel, line in book.lines.items():
            oldest, servable = self._submitted_ns(line.oldest()), self._submitted_ns(line.oldest_servable())
            lines.append(LineView(channel, len(line), book.leased_by_channel[channel], oldest, servable))
        connected = book.backlog_stream is not None
        results, last = book.counters.results, book.counters.completion_seq
        return QueueView(ticket, tuple(lines), len(book.dead), results, len(self._workers), connected, last)

    def _submitted_ns(self, seq: int | None) -> int:
        """Return when the waiting request was submitted, 0 of none."""
        return 0 if seq is None else self.book.entries[seq].meta.submitted_ns

    # ---- the scheduler ----

    def _backlog_opened(self, message: BacklogOpened, _now_ns: int) -> None:
        """Announce to this stream from now on, if no other scheduler is connected: two that took what waits from each
        other would both grant hardly anything. One with workers takes it from one that serves nobody, and so does not
        lose it again.
        """
        holder = self.book.backlog_stream
        if holder is not None:
            if not message.instance_id or not self._scheduler_id or message.instance_id == self._scheduler_id:
                self.book.emit(EndStream(holder, "a newer Backlog stream replaced this one"))
            elif message.workers and not self._scheduler_serves:
                self.book.emit(SchedulerTaken(holder))
            else:
                self.book.emit(SchedulerTaken(message.stream))
                return
        self._scheduler_id = message.instance_id
        self._scheduler_serves = message.workers > 0
        self._reset_backlog(message.stream)
        self.book.emit(BacklogReady(message.stream, tuple(self.book.lines)))

    def _backlog_closed(self, message: BacklogClosed, _now_ns: int) -> None:
        if message.stream == self.book.backlog_stream:
            self._reset_backlog(None)

    def _reset_backlog(self, stream: int | None) -> None:
        self.book.backlog_stream = stream
        for line in self.book.lines.values():
            line.forget_announcements()

    def _set_window(self, message: SetWindow, _now_ns: int) -> None:
        line = self.book.lines.get(message.channel)
        if message.stream == self.book.backlog_stream and line is not None:
            self._scheduler_serves = bool(message.served)
            line.set_served(message.served)
            line.set_limit(message.limit)
            self.book.touch(message.channel)

    def _reconfigure(self, message: Reconfigure, _now_ns: int) -> None:
        """Make the lines of new channels; that of a removed one stays, for what waits in it or comes back to it."""
        for channel in message.channels:
            if channel not in self.book.lines:
                self.book.open_line(channel)

    def _reject(self, message: Reject, now_ns: int) -> None:
        entry = self.book.find(message.request_id)
        if message.stream == self.book.backlog_stream and entry is not None:
            change = Change(Input.REJECT, now_ns, outcome=Outcome.REJECTED, failure=message.failure)
            self.book.apply(entry, change)

    # ---- time ----

    def _tick(self, message: Tick, now_ns: int) -> None:
        self._pass_deadlines(now_ns)
        self._workers.tick(now_ns, min(now_ns, message.said_ns), ENDED_AT_ONCE)
        violations = self.audit.look()
        if violations:
            self.book.emit(AuditFailed(violations))

    def _pass_deadlines(self, now_ns: int) -> None:
        """End some of those whose time is over; the next ticks end the rest, and nobody is given them meanwhile."""
        deadlines = self.book.deadlines
        for _ in range(ENDED_AT_ONCE):
            if not deadlines or deadlines.first()[0] > now_ns:
                break
            first = deadlines.first()
            deadlines.discard(first)
            self._stop(self.book.entries[first[1]], Input.DEADLINE, Outcome.EXPIRED, now_ns)
