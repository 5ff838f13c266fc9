"""Owner of every live request: the only place where a request changes its state.

Each change goes through the lifecycle table and leaves, as effects, the store
writes that make it durable. A request is in exactly one of the families `ready`,
`leases` and `dead`, or it has ended and only its result is left.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from services.queue.core import records
from services.queue.core.change import STOP_REASONS, Change, stop_failure
from services.queue.core.effects import (
    Announce,
    ChannelsChanged,
    Deliver,
    Effect,
    Ended,
    Gone,
    GoneReason,
    LeaseEnded,
    PutResult,
    StopRun,
    WentBack,
    Write,
)
from services.queue.core.entry import BatchKey, Entry, Failure, LeaseRef, Recovered, RequestMeta, request_id_of
from services.queue.core.lifecycle import Action, Input, Outcome, State, transition
from services.queue.core.lines import Line
from services.queue.core.ordered import Ordered
from services.queue.core.quotas import Waiting

ENGINE_DEAD: Final = "engine_dead"
"""Code of a worker's failure of all that its engine ran when it died: of one of these, or by itself."""


class Book:
    """Live requests with their lines, leases and dead letters."""

    def __init__(
        self,
        store_id: str,
        channels: Iterable[str],
        lease_ns: int,
        recovered: Recovered,
        now_ns: int,
        max_attempts: int,
    ) -> None:
        """Take over what the store holds; every recovered lease gets a fresh `lease_ns`."""
        self.store_id = store_id
        self.counters = recovered.counters
        self.entries: dict[int, Entry] = {}
        self._by_name: dict[str, Entry] = {}
        self.lines: dict[str, Line] = {channel: Line() for channel in channels}
        self.leases: OrderedDict[int, int] = OrderedDict()
        """When each lease expires, soonest first: every renewal moves its lease to the end."""
        self.holdings: defaultdict[str, set[int]] = defaultdict(set)
        """Leases by worker."""
        self.dead: dict[int, None] = {}
        """Dead letters, oldest first."""
        self.batches: defaultdict[BatchKey, set[int]] = defaultdict(set)
        """Requests of each batch that wait or run."""
        self.leased_by_batch: defaultdict[BatchKey, int] = defaultdict(int)
        self.leased_by_channel: defaultdict[str, int] = defaultdict(int)
        self.changed_batches: set[BatchKey] = set()
        self.waiting = Waiting()
        """What waits of each tenant."""
        self.deadlines: Ordered[tuple[int, int]] = Ordered()
        """Those that have not passed, with the requests that wait or run until then, soonest first."""
        self.backlog_stream: int | None = None
        self._lease_ns = lease_ns
        self._last_from = max(max_attempts - 1, 1)
        """Attempts that counted after which the next is said to be the last, if an engine died in one of them."""
        self._out: list[Effect] = []
        self._touched_lines: set[str] = set()
        self._actions: dict[Action, Callable[[Entry, Change], None]] = {
            Action.STORE: self._store,
            Action.LEASE: self._lease,
            Action.RECORD: self._record,
            Action.REQUEUE: self._requeue,
            Action.RETURN: self._return,
            Action.STOP: self._stop,
            Action.END: self._end,
            Action.END_STOPPED: self._end_stopped,
            Action.BURY: self._bury,
            Action.REVIVE: self._revive,
            Action.FORGET_LETTER: self._forget_letter,
            Action.KEEP: self._keep,
        }
        for entry in sorted(recovered.entries, key=_by_death):
            self.adopt(entry, now_ns)

    def end(self) -> None:
        """Never be asked to change anything again; see `Machine.end`."""
        self._actions.clear()

    def adopt(self, entry: Entry, now_ns: int) -> None:
        """Take over a live request that the store holds."""
        self._know(entry)
        if entry.state is State.DEAD:
            self.dead[entry.seq] = None
            return
        self._remember_deadline(entry)
        if entry.state is State.READY:
            self._enter_line(entry)
        else:
            self._enter_lease(entry, now_ns)

    def _know(self, entry: Entry) -> None:
        entry.name = self.name_of(entry.seq)
        self.entries[entry.seq] = entry
        self._by_name[entry.name] = entry

    # ---- what the machine asks ----

    def emit(self, effect: Effect) -> None:
        """Add one effect to the present step."""
        self._out.append(effect)

    def take_effects(self) -> list[Effect]:
        """Announce what the windows let through, then return the effects of the step."""
        if self._touched_lines:
            self._announce()
        effects, self._out = self._out, []
        return effects

    def open_line(self, channel: str) -> Line:
        """Make the line of a channel that has none, and tell the scheduler, whose window it needs."""
        line = self.lines[channel] = Line()
        if self.backlog_stream is not None:
            self.emit(ChannelsChanged(self.backlog_stream, tuple(self.lines)))
        return line

    @property
    def names(self) -> int:
        """Number of names that are known."""
        return len(self._by_name)

    def name_of(self, seq: int) -> str:
        """Return the name of request `seq`."""
        return request_id_of(self.store_id, seq)

    def find(self, request_id: str) -> Entry | None:
        """Return the live request of this name, or None."""
        return self._by_name.get(request_id)

    def lease_of(self, entry: Entry) -> LeaseRef:
        """Return the name of the lease that `entry` is under."""
        return LeaseRef(entry.name, entry.attempt, entry.fencing_token)

    def leased(self, lease: LeaseRef) -> Entry | None:
        """Return the request if `lease` is still its lease, else None."""
        entry = self.find(lease.request_id)
        if entry is None or entry.seq not in self.leases:
            return None
        current = entry.attempt == lease.attempt and entry.fencing_token == lease.fencing_token
        return entry if current else None

    def renew(self, seq: int, now_ns: int) -> None:
        """Give a lease its full length again."""
        self.leases[seq] = now_ns + self._lease_ns
        self.leases.move_to_end(seq)

    def prolong(self, by_ns: int, now_ns: int) -> None:
        """Have every lease last so much longer, but none longer than if it were renewed; their order stays."""
        most_ns = now_ns + self._lease_ns
        for seq, expires_ns in self.leases.items():
            self.leases[seq] = min(expires_ns + by_ns, most_ns)

    def add(self, meta: RequestMeta, payload: bytes, now_ns: int) -> Entry:
        """Store a new request and let it wait."""
        self.counters.seq += 1
        entry = Entry(self.counters.seq, meta.submitted(now_ns), State.ABSENT)
        self.apply(entry, Change(Input.SUBMIT, now_ns, body=payload))
        return entry

    def apply(self, entry: Entry, change: Change) -> bool:
        """Do what the lifecycle table says; return False, with nothing changed, if the input is refused."""
        found = transition(entry.state, change.event)
        if found is None:
            return False
        state, action = found
        self._actions[action](entry, change)
        entry.state = state
        return True

    def tell_stop(self, entry: Entry, stream: int) -> None:
        """Tell the worker on `stream` of a request of its own that was stopped."""
        assert entry.stop_outcome is not None, "one that is stopped has an outcome"
        self.emit(StopRun(stream, self.lease_of(entry), STOP_REASONS[entry.stop_outcome]))

    def touch(self, channel: str) -> None:
        """Have the channel's line announced at the end of the step."""
        self._touched_lines.add(channel)

    # ---- actions ----

    def _store(self, entry: Entry, change: Change) -> None:
        key = records.seq_key(entry.seq)
        self._write(records.PAYLOADS, key, change.body)
        self._know(entry)
        self._write(records.REQUESTS, key, records.encode_meta(entry.meta))
        if entry.meta.idempotency_key:
            name = records.idempotency_key(entry.meta.tenant, entry.meta.idempotency_key)
            self._write(records.IDEMPOTENCY, name, key)
        self._remember_deadline(entry)
        self._wait(entry)

    def _lease(self, entry: Entry, change: Change) -> None:
        to = change.to
        assert to is not None, "a request is leased to somebody"
        self._leave_line(entry, GoneReason.CLAIMED)
        self.counters.fencing_token += 1
        entry.attempts += 1
        entry.fencing_token = self.counters.fencing_token
        entry.worker_id = to.worker_id
        entry.instance_id = to.instance_id
        entry.leased_ns = change.now_ns
        self._write(records.LEASES, records.seq_key(entry.seq), records.encode_lease(entry))
        self._enter_lease(entry, change.now_ns)
        self.emit(
            Deliver(
                stream=to.stream,
                seq=entry.seq,
                lease=self.lease_of(entry),
                watched=to.watched,
                submitted_ns=entry.meta.submitted_ns,
                leased_ns=change.now_ns,
                meta=entry.meta,
                grant=to.grant,
                payload=to.payload,
            )
        )

    def _record(self, entry: Entry, change: Change) -> None:
        self._leave_lease(entry, change)
        self._finish(entry, change)

    def _requeue(self, entry: Entry, change: Change) -> None:
        self._leave_lease(entry, change)
        if change.failure is not None:
            entry.last_error = change.failure.message
            entry.engine_died |= change.failure.code == ENGINE_DEAD
        self._wait(entry)
        self.emit(WentBack(entry.meta.channel, change.event.value))

    def _return(self, entry: Entry, change: Change) -> None:
        self._leave_lease(entry, change)
        entry.attempts -= 1
        entry.uncounted += 1
        self._wait(entry)
        self.emit(WentBack(entry.meta.channel, change.event.value))

    def _stop(self, entry: Entry, change: Change) -> None:
        entry.stop_outcome = change.outcome
        self._write(records.LEASES, records.seq_key(entry.seq), records.encode_lease(entry))
        if change.stream is not None:
            self.tell_stop(entry, change.stream)

    def _end(self, entry: Entry, change: Change) -> None:
        self._leave_line(entry, GoneReason.ENDED)
        self._finish(entry, change)

    def _end_stopped(self, entry: Entry, change: Change) -> None:
        outcome = entry.stop_outcome
        self._leave_lease(entry, change)
        self._finish(entry, change.replace(outcome=outcome, failure=stop_failure(outcome), body=None))

    def _bury(self, entry: Entry, change: Change) -> None:
        self._leave_lease(entry, change)
        failure = change.failure or Failure("attempts_exhausted", "every attempt failed")
        entry.last_error = failure.message
        entry.died_ns = change.now_ns
        self._put_result(entry, change.replace(outcome=Outcome.DEAD, failure=failure, body=None))
        entry.completion_seq = self.counters.completion_seq
        self._write(records.DEAD, records.seq_key(entry.completion_seq), records.encode_dead(entry))
        self.dead[entry.seq] = None
        self._forget_deadline(entry)

    def _revive(self, entry: Entry, change: Change) -> None:
        self._erase_result(entry)
        self._write(records.DEAD, records.seq_key(entry.completion_seq), None)
        del self.dead[entry.seq]
        entry.uncounted += entry.attempts
        entry.attempts = 0
        entry.engine_died = False
        entry.stop_outcome = None
        self._remember_deadline(entry)
        self._wait(entry)
        self.emit(WentBack(entry.meta.channel, change.event.value))

    def _forget_letter(self, entry: Entry, _change: Change) -> None:
        self._write(records.DEAD, records.seq_key(entry.completion_seq), None)
        del self.dead[entry.seq]
        self._forget(entry)

    def _keep(self, _entry: Entry, _change: Change) -> None:
        """Nothing changes."""

    # ---- parts of actions ----

    def _write(self, family: str, key: bytes, value: bytes | None) -> None:
        self._out.append(Write(family, key, value))

    def _wait(self, entry: Entry) -> None:
        self._write(records.READY, records.ready_key(entry), records.encode_ready(entry))
        self._enter_line(entry)

    def _enter_line(self, entry: Entry) -> None:
        channel = entry.meta.channel
        line = self.lines.get(channel)
        if line is None:  # a channel that is no longer configured but still has requests
            line = self.open_line(channel)
        line.enter(entry.seq, entry.meta.priority, entry.meta.model)
        self.waiting.enter(entry.meta)
        self._touched_lines.add(channel)
        self.batches[entry.meta.batch_key].add(entry.seq)
        self.changed_batches.add(entry.meta.batch_key)

    def _leave_line(self, entry: Entry, reason: GoneReason) -> None:
        self._write(records.READY, records.ready_key(entry), None)
        announced = self.lines[entry.meta.channel].leave(entry.seq, entry.meta.model)
        self.waiting.leave(entry.meta)
        self._touched_lines.add(entry.meta.channel)
        self._leave_batch(entry)
        if announced and self.backlog_stream is not None:
            self.emit(Gone(self.backlog_stream, entry.name, reason, entry.attempt + 1))

    def _enter_lease(self, entry: Entry, now_ns: int) -> None:
        self.renew(entry.seq, now_ns)
        self.holdings[entry.worker_id].add(entry.seq)
        self.leased_by_batch[entry.meta.batch_key] += 1
        self.leased_by_channel[entry.meta.channel] += 1
        self.batches[entry.meta.batch_key].add(entry.seq)
        self.changed_batches.add(entry.meta.batch_key)

    def _leave_lease(self, entry: Entry, change: Change) -> None:
        self.emit(
            LeaseEnded(
                request_id=entry.name,
                meta=entry.meta,
                attempt=entry.attempt,
                worker_id=entry.worker_id,
                leased_ns=entry.leased_ns,
                ended_ns=change.now_ns,
                cause=(change.exhausted_by or change.event).value,
                body=change.body,
                failure=None if change.event is Input.COMPLETE else change.failure,
                last=change.exhausted_by is not None,
            )
        )
        self._write(records.LEASES, records.seq_key(entry.seq), None)
        del self.leases[entry.seq]
        held = self.holdings[entry.worker_id]
        held.discard(entry.seq)
        if not held:
            del self.holdings[entry.worker_id]
        self.leased_by_channel[entry.meta.channel] -= 1
        batch = entry.meta.batch_key
        self.leased_by_batch[batch] -= 1
        if not self.leased_by_batch[batch]:
            del self.leased_by_batch[batch]
        self._leave_batch(entry)

    def _leave_batch(self, entry: Entry) -> None:
        batch = entry.meta.batch_key
        live = self.batches[batch]
        live.discard(entry.seq)
        if not live:
            del self.batches[batch]
        self.changed_batches.add(batch)

    def _finish(self, entry: Entry, change: Change) -> None:
        self._put_result(entry, change)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        key = records.seq_key(entry.seq)
        self._write(records.REQUESTS, key, None)
        self._write(records.PAYLOADS, key, None)
        del self.entries[entry.seq]
        del self._by_name[entry.name]
        self._forget_deadline(entry)

    def _remember_deadline(self, entry: Entry) -> None:
        if entry.meta.deadline_ns:
            self.deadlines.add((entry.meta.deadline_ns, entry.seq))

    def _forget_deadline(self, entry: Entry) -> None:
        if entry.meta.deadline_ns:
            self.deadlines.discard((entry.meta.deadline_ns, entry.seq))

    def _put_result(self, entry: Entry, change: Change) -> None:
        assert change.outcome is not None, "a request ends with an outcome"
        self.counters.completion_seq += 1
        self.counters.results += 1
        position = self.counters.completion_seq
        key = records.seq_key(entry.seq)
        name = entry.name
        ran = entry.state in {State.LEASED, State.STOPPING}
        self._write(records.COMPLETIONS, records.completion_key(entry.meta.batch_key, position), key)
        self._write(records.EXPIRY, records.expiry_key(change.now_ns, entry.seq), b"")
        self.emit(
            PutResult(
                request_id=name,
                seq=entry.seq,
                meta=entry.meta,
                outcome=change.outcome,
                failure=change.failure,
                attempts=entry.attempts,
                worker_id=entry.worker_id if ran else "",
                delivered_ns=entry.leased_ns if ran else 0,
                completed_ns=change.now_ns,
                completion_seq=position,
                body=change.body,
            )
        )
        self.emit(
            Ended(
                seq=entry.seq, request_id=name, meta=entry.meta, outcome=change.outcome, attempts=entry.attempts,
                completed_ns=change.now_ns, completion_seq=position, body=change.body, failure=change.failure,
                waited_for=0 if ran else entry.attempt + 1, attempt=entry.attempt,
            )
        )  # fmt: skip

    def _erase_result(self, entry: Entry) -> None:
        self.counters.results -= 1
        self._write(records.RESULTS, records.seq_key(entry.seq), None)
        self._write(records.COMPLETIONS, records.completion_key(entry.meta.batch_key, entry.completion_seq), None)
        self._write(records.EXPIRY, records.expiry_key(entry.died_ns, entry.seq), None)

    def _announce(self) -> None:
        touched, self._touched_lines = self._touched_lines, set()
        if self.backlog_stream is None:
            return
        for channel in sorted(touched):
            for seq in self.lines[channel].announce():
                entry = self.entries[seq]
                last = entry.engine_died and entry.attempts >= self._last_from
                self.emit(Announce(self.backlog_stream, entry.name, seq, entry.attempt + 1, entry.meta, last))


def _by_death(entry: Entry) -> tuple[int, int]:
    """Sort dead letters by death and leave the rest in front, in order of submit."""
    return (entry.completion_seq, entry.seq)
