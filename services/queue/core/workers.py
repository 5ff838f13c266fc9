"""Workers, their streams and their leases: claims, completions, and what happens when one of them is lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from services.queue.core.book import Book
from services.queue.core.change import Change, Lessee, stop_failure
from services.queue.core.effects import (
    EndStream,
    NameTaken,
    Recorded,
    Refused,
    RefusedReason,
    StaleCompletion,
    StopReason,
    StopRun,
    TokensWatched,
    WorkOpened,
)
from services.queue.core.entry import BatchKey, Entry, Failure, parse_request_id
from services.queue.core.lifecycle import Input, Outcome, State
from services.queue.core.messages import (
    Claim,
    Complete,
    GiveBack,
    Offer,
    Renew,
    StoodStill,
    WatchTokens,
    Withdraw,
    WorkerClosed,
    WorkerOpened,
)
from services.queue.core.offers import Offers

MOST_UNCOUNTED: Final = 32
"""Attempts of a request after which one counts that is handed back, or lost with its stream, with the queue or in a
standstill of it: what ends each worker, breaks each stream or takes down each host must not go on for ever, and a bad
link, a drain or a power cut does not meet the same request so often."""

HANDED_BACK: Final = Failure("handed_back", f"handed back by its worker; {MOST_UNCOUNTED} attempts had not counted yet")


class Rules(NamedTuple):
    """What the machine is configured with."""

    channels: tuple[str, ...]
    max_attempts: int
    lease_ns: int
    worker_grace_ns: int
    max_inflight: int
    """Most leases of one worker."""
    patience_ns: int
    """How long a worker waits for a sign of the queue before it ends its stream."""


@dataclass(slots=True)
class Worker:
    """One worker and its Work stream, if it has one."""

    worker_id: str
    instance_id: str
    stream: int | None
    return_by_ns: int = 0
    """When the leases of a worker without a stream are requeued."""
    shaken_until_ns: int = 0
    """Until when its stream may end of a standstill of the queue that it has lasted over."""


class Workers:
    """The workers the queue knows: those with a Work stream, and those that may return in time."""

    def __init__(self, book: Book, rules: Rules) -> None:
        """Know no worker yet; recovered leases wait for theirs, or expire."""
        self._book = book
        self._rules = rules
        self._workers: dict[str, Worker] = {}
        """Those seen in this life of the queue, and not lost by a standstill since; all that each holds it has been
        leased in it, or has come back with."""
        self._by_stream: dict[int, Worker] = {}
        self._offers = Offers()
        self._watched_seqs: defaultdict[int, set[int]] = defaultdict(set)
        self._watched_batches: defaultdict[BatchKey, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        """Return the number of workers with an open stream."""
        return len(self._by_stream)

    def worker_opened(self, message: WorkerOpened, now_ns: int) -> None:
        """Take a worker in: adopt the leases it still holds, requeue those it does not.

        Not while another instance of its name is connected: two that took each other's leases would use
        up the attempts of every request. What an instance that has been seen was running when the next one came
        counts; what the same process does not hold it has not run, for the delivery, or its giving it back, was
        lost with the stream.
        """
        known = self._workers.get(message.worker_id)
        if known is not None and known.stream is not None:
            if known.instance_id != message.instance_id:
                self._book.emit(NameTaken(message.stream, message.worker_id))
                return
            self._book.emit(EndStream(known.stream, "a newer Work stream of this worker replaced this one"))
            del self._by_stream[known.stream]
            self._offers.drop(known.stream)
        worker = Worker(message.worker_id, message.instance_id, message.stream)
        self._workers[message.worker_id] = worker
        self._by_stream[message.stream] = worker
        self._book.emit(WorkOpened(message.stream))
        adopted = self._adopt(worker, message, now_ns)
        counts = known is not None and known.instance_id != message.instance_id
        miss = self._lose if counts else self._return
        failure = Failure(Input.WORKER_LOST.value, "the worker restarted without the request")
        for seq in sorted(self._book.holdings.get(message.worker_id, set()) - adopted):
            miss(self._book.entries[seq], Input.WORKER_LOST, failure, now_ns)

    def _adopt(self, worker: Worker, message: WorkerOpened, now_ns: int) -> set[int]:
        """Keep the leases the worker still holds, and tell it of those that are lost."""
        adopted = set()
        for lease in message.held:
            entry = self._book.leased(lease)
            ours = entry is not None and entry.worker_id == worker.worker_id
            if entry is None or not ours or entry.instance_id != worker.instance_id:
                self._book.emit(StopRun(message.stream, lease, StopReason.LEASE_LOST))
                continue
            adopted.add(entry.seq)
            self._book.renew(entry.seq, now_ns)
            if entry.state is State.STOPPING:
                self._book.tell_stop(entry, message.stream)
            self._tell_watched(entry, self._is_watched(entry))
        return adopted

    def worker_closed(self, message: WorkerClosed, now_ns: int) -> None:
        """Give a worker whose stream ended some time to return."""
        worker = self._by_stream.pop(message.stream, None)
        if worker is None:
            return
        self._offers.drop(message.stream)
        worker.stream = None
        worker.return_by_ns = now_ns + self._rules.worker_grace_ns
        if now_ns < worker.shaken_until_ns or worker.worker_id not in self._book.holdings:
            self._forget(worker, now_ns)

    def stood_still(self, message: StoodStill, now_ns: int) -> None:
        """Count no lease's time for which nobody was heard; where workers have given the queue up for it, be as one
        that was restarted.

        Those without a stream, and those whose stream ends of it yet, may be trying to return, with pauses that have
        grown longer than their grace, or may be dead: nobody can tell. So each has a whole lease to return, and what it
        does not come back with costs no attempt.
        """
        self._book.prolong(message.for_ns, now_ns)
        if message.for_ns < self._rules.patience_ns:
            for worker in self._workers.values():
                if worker.stream is None:
                    most_ns = now_ns + self._rules.worker_grace_ns
                    worker.return_by_ns = min(worker.return_by_ns + message.for_ns, most_ns)
            return
        for worker in list(self._workers.values()):
            if worker.stream is None:
                self._forget(worker, now_ns)
            else:
                # Of a probe that was under way when the queue went on its worker waits no longer than that.
                worker.shaken_until_ns = now_ns + self._rules.patience_ns

    def _forget(self, worker: Worker, now_ns: int) -> None:
        """Know no more of a worker without a stream than a start does: what it holds is leased, from now on."""
        del self._workers[worker.worker_id]
        for seq in sorted(self._book.holdings.get(worker.worker_id, ())):
            self._book.renew(seq, now_ns)

    def claim(self, message: Claim, now_ns: int) -> None:
        """Lease a waiting request to the worker, or refuse."""
        worker = self._by_stream.get(message.stream)
        if worker is None:
            return  # its stream has ended meanwhile
        entry = self._still_wanted(message.request_id, now_ns)
        reason = self._refusal(worker, entry, message.request_id)
        if entry is None or reason is not None:
            self._book.emit(Refused(message.stream, message.request_id, reason or RefusedReason.UNKNOWN))
            return
        self._lease(message.stream, entry, now_ns)

    def _still_wanted(self, request_id: str, now_ns: int) -> Entry | None:
        """Return a request that lives, having ended it if its deadline has passed while it waited."""
        entry = self._book.find(request_id)
        if entry is not None and entry.state is State.READY and _is_late(entry, now_ns):
            failure = stop_failure(Outcome.EXPIRED)
            self._book.apply(entry, Change(Input.DEADLINE, now_ns, outcome=Outcome.EXPIRED, failure=failure))
            return None
        return entry

    def _lease(self, stream: int, entry: Entry, now_ns: int, grant: str = "", payload: bytes | None = None) -> None:
        """Lease a waiting request to the worker on `stream`, which must have one."""
        worker = self._by_stream[stream]
        to = Lessee(worker.worker_id, worker.instance_id, stream, self._is_watched(entry), grant, payload)
        self._book.apply(entry, Change(Input.CLAIM, now_ns, to=to))

    def offer(self, message: Offer, _now_ns: int) -> None:
        """Keep a worker's offer for a request that is yet to come."""
        if message.stream in self._by_stream and not self._offers.add(message):
            self._book.emit(Refused(message.stream, message.grant, RefusedReason.TOO_MANY))

    def withdraw(self, message: Withdraw, _now_ns: int) -> None:
        """Let a worker have its offer back; of one that has met its request it will hear, or has heard."""
        if self._offers.withdraw(message.stream, message.grant):
            self._book.emit(Refused(message.stream, message.grant, RefusedReason.WITHDRAWN))

    def meet_offer(self, entry: Entry, payload: bytes, now_ns: int) -> None:
        """Lease a request that has just been stored, and that nobody has heard of, to a worker that offers to run it.

        Not before others that wait for the same: those are the scheduler's to grant.
        """
        if not self._offers or self._book.lines[entry.meta.channel].waiting_for(entry.meta.model) > 1:
            return
        if _is_late(entry, now_ns):
            return
        offer = self._offers.take(entry.meta, lambda stream: self._has_room(self._by_stream[stream]))
        if offer is None:
            return
        self._lease(offer.stream, entry, now_ns, offer.grant, payload)

    def _has_room(self, worker: Worker) -> bool:
        return len(self._book.holdings.get(worker.worker_id, ())) < self._rules.max_inflight

    def _refusal(self, worker: Worker, entry: Entry | None, request_id: str) -> RefusedReason | None:
        if entry is None:
            seq = parse_request_id(self._book.store_id, request_id)
            return RefusedReason.ENDED if 0 < seq <= self._book.counters.seq else RefusedReason.UNKNOWN
        if entry.state is State.DEAD:
            return RefusedReason.ENDED
        if entry.state is not State.READY:
            return RefusedReason.LEASED
        if not self._has_room(worker):
            return RefusedReason.TOO_MANY
        return None

    def complete(self, message: Complete, now_ns: int) -> None:
        """Record how an attempt ended, unless its lease is stale."""
        entry = self._book.leased(message.lease)
        if entry is None:
            self._book.emit(StaleCompletion())
        elif message.outcome is None:
            failure = message.failure or Failure("worker_error", "the worker gave no reason")
            self._lose(entry, Input.FAIL, failure, now_ns)
        else:
            change = Change(Input.COMPLETE, now_ns, message.outcome, message.failure, message.body)
            self._book.apply(entry, change)
        self._book.emit(Recorded(message.stream, message.lease, entry is not None))

    def _return(self, entry: Entry, event: Input, failure: Failure, now_ns: int) -> None:
        """End an attempt that does not count, unless too many have not."""
        if entry.uncounted < MOST_UNCOUNTED:
            self._book.apply(entry, Change(Input.GIVE_BACK, now_ns))
        else:
            self._lose(entry, event, failure, now_ns)

    def _lose(self, entry: Entry, event: Input, failure: Failure, now_ns: int) -> None:
        """End an attempt without a result: another attempt, or the end if this was the last."""
        if entry.attempts >= self._rules.max_attempts:
            self._book.apply(entry, Change(Input.EXHAUST, now_ns, failure=failure, exhausted_by=event))
        else:
            self._book.apply(entry, Change(event, now_ns, failure=failure))

    def renew(self, message: Renew, now_ns: int) -> None:
        """Give leases their full length again; tell the worker of those it has lost."""
        for lease in message.leases:
            entry = self._book.leased(lease)
            if entry is None:
                self._book.emit(StopRun(message.stream, lease, StopReason.LEASE_LOST))
            else:
                self._book.renew(entry.seq, now_ns)

    def give_back(self, message: GiveBack, now_ns: int) -> None:
        """Let handed-back requests wait again."""
        for lease in message.leases:
            entry = self._book.leased(lease)
            if entry is not None:
                self._return(entry, Input.FAIL, HANDED_BACK, now_ns)

    def tick(self, now_ns: int, by_ns: int, most: int) -> None:
        """Requeue what had run out of lease by then, and the leases of workers that had not returned; `most` at once.

        The next ticks requeue the rest, but for what its worker renews, or comes back with, meanwhile.
        """
        while self._book.leases and most > 0:
            seq, expires_ns = next(iter(self._book.leases.items()))
            if expires_ns > by_ns:
                break
            self._expire_lease(self._book.entries[seq], now_ns)
            most -= 1
        failure = Failure(Input.WORKER_LOST.value, "the worker was lost")
        for worker in [w for w in self._workers.values() if w.stream is None and w.return_by_ns <= by_ns]:
            seqs = sorted(self._book.holdings.get(worker.worker_id, ()))
            for seq in seqs[:most]:
                self._lose(self._book.entries[seq], Input.WORKER_LOST, failure, now_ns)
            if len(seqs) > most:
                break
            most -= len(seqs)
            del self._workers[worker.worker_id]

    def _expire_lease(self, entry: Entry, now_ns: int) -> None:
        """Requeue what has not been renewed.

        Of a worker not seen since the queue started, or since a standstill by which it was lost, nobody can tell what
        ended it: a host that loses its power takes along all that run there, whatever they ran, and one that was to
        stop had nobody to hand its runs back to.
        """
        lease = self._book.lease_of(entry)
        stream = self.stream_of(entry)
        if stream is not None:
            self._book.emit(StopRun(stream, lease, StopReason.LEASE_LOST))
        miss = self._lose if entry.worker_id in self._workers else self._return
        miss(entry, Input.LEASE_EXPIRED, Failure(Input.LEASE_EXPIRED.value, "the lease expired"), now_ns)

    def stream_of(self, entry: Entry) -> int | None:
        """Return the stream of the worker that had the request last, None if it has none, or there is no such."""
        worker = self._workers.get(entry.worker_id)
        return None if worker is None else worker.stream

    def watch_tokens(self, message: WatchTokens, _now_ns: int) -> None:
        """Note who watches tokens, and tell the workers concerned."""
        if message.seqs is None:
            _note(self._watched_batches, message.batch, message)
            concerned = self._book.batches.get(message.batch, set())
        else:
            for seq in message.seqs:
                _note(self._watched_seqs, seq, message)
            concerned = set(message.seqs)
        for seq in sorted(concerned & self._book.leases.keys()):  # takes time with the fewer of both
            self._tell_watched(self._book.entries[seq], message.on)

    def _is_watched(self, entry: Entry) -> bool:
        return entry.seq in self._watched_seqs or entry.meta.batch_key in self._watched_batches

    def _tell_watched(self, entry: Entry, on: bool) -> None:
        """Tell the worker; also when someone watches already: the new watcher needs everything from the start."""
        watched = self._is_watched(entry)
        stream = self.stream_of(entry)
        if watched is on and stream is not None:
            self._book.emit(TokensWatched(stream, entry.name, watched))


def _is_late(entry: Entry, now_ns: int) -> bool:
    return 0 < entry.meta.deadline_ns <= now_ns


def _note(watchers: defaultdict[Any, set[int]], key: object, message: WatchTokens) -> None:
    if message.on:
        watchers[key].add(message.watcher)
        return
    watchers[key].discard(message.watcher)
    if not watchers[key]:
        del watchers[key]
