"""The referee of the cores: each step of the queue and of the scheduler is held against the promises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.queue.core import effects as q
from services.queue.core import messages as qm
from services.queue.core import records
from services.queue.core.book import Book
from services.queue.core.entry import LeaseRef, RequestMeta, parse_request_id
from services.queue.core.machine import Machine as QueueMachine
from services.queue.outlet import Early
from services.scheduler.core import messages as m
from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.estimate import needed_blocks
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Worker
from services.scheduler.core.lifecycle import State
from services.scheduler.core.machine import Machine as SchedulerMachine
from services.scheduler.core.sharing.line import FRONT_REQUESTS
from tests.simulation.durable import STORE_ID, Durable
from tests.simulation.world import demand

NO_PROMISES = frozenset({q.TokensWatched, q.EndStream, q.NameTaken, q.PutResult})
"""Effects that say nothing of what is on disk."""


class QueueReferee:
    """Knows which lease of each request is in force, from the queue's own writes, and who was told what."""

    def __init__(self, durable: Durable) -> None:
        """Hold the queue against `durable`."""
        self._durable = durable
        self._book: Book | None = None
        self._tokens: dict[int, int] = {}
        self._unsynced: list[q.Write] = []
        """Rows of the steps whose effects have not been released."""
        self._told_tokens: set[int] = set()
        self._told_names: dict[str, RequestMeta] = {}

    def took_over(self, machine: QueueMachine) -> None:
        """Take a machine that knows the store, or the first part of it."""
        self._book = machine.book
        self._unsynced.clear()
        self._tokens = dict(self._durable.leases)

    def knows_all(self) -> None:
        """Hold a machine that has read the whole store against what is there."""
        assert self._book is not None
        entries, leases = self._book.entries, self._book.leases
        demand(entries.keys() == self._durable.live, "the queue came back without a request, or with one too many")
        tokens = {seq: entries[seq].fencing_token for seq in leases}
        demand(tokens == self._durable.leases, "the queue came back with other leases than the store has")

    def stepped(self, message: qm.Message, effects: Sequence[q.Effect]) -> None:
        """Hold one step against the promises."""
        if isinstance(message, qm.SetWindow | qm.Reject) and message.stream != self._backlog():
            demand(not effects, f"a message of an old Backlog stream counted: {message}")
        elif isinstance(message, qm.Complete):
            self._completed(message, effects)
        for effect in effects:
            if type(effect) is q.AuditFailed:
                demand(False, f"the queue's audit: {effect.violations}")
            if type(effect) is q.Write:
                self._unsynced.append(effect)
            if type(effect) is q.Write and effect.family == records.LEASES and effect.value is None:
                self._tokens.pop(records.seq_of(effect.key), None)
            elif type(effect) is q.Deliver:
                seq, token = effect.seq, effect.lease.fencing_token
                demand(seq not in self._tokens, f"request {seq} was leased twice at once")
                self._tokens[seq] = token

    def _backlog(self) -> int | None:
        return self._book.backlog_stream if self._book is not None else None

    def _completed(self, message: qm.Complete, effects: Sequence[q.Effect]) -> None:
        """A completion under a lease that is not in force changes nothing."""
        seq = parse_request_id(STORE_ID, message.lease.request_id)
        if self._tokens.get(seq) != message.lease.fencing_token:
            changed = [effect for effect in effects if type(effect) is q.Write]
            demand(not changed, f"a completion of request {seq} under a stale lease was accepted")

    def foretold(self, early: Early) -> None:
        """Hold what is said early against the numbers ever said: what a crash undoes is never said of anything else."""
        for effect in early.for_workers:
            if type(effect) is q.Deliver:
                token = effect.lease.fencing_token
                demand(token not in self._told_tokens, f"fencing token {token} was given to two leases")
                self._told_tokens.add(token)
        for effect in early.for_scheduler:
            if type(effect) is q.Announce:
                known = self._told_names.setdefault(effect.request_id, effect.meta)
                demand(known == effect.meta, f"{effect.request_id} is the name of two requests")

    def released(self, effects: Sequence[Any]) -> None:
        """Hold what is said against what is durable: nothing may be said of what a crash could still undo."""
        for write in self._unsynced:
            told = [effect for effect in effects if type(effect) not in NO_PROMISES]
            demand(
                not told or self._durable.has_synced(write),
                f"said before what it follows from is on disk: {told[:1]}, {write}",
            )
        self._unsynced.clear()
        for effect in effects:
            kind = type(effect)
            if kind is q.Submitted:
                for request_id, _ in effect.acks:
                    demand(self._durable.exists(request_id), f"{request_id} is acknowledged and not on disk")
            elif kind is q.Recorded and effect.accepted:
                seq = parse_request_id(STORE_ID, effect.lease.request_id)
                held = self._durable.leases.get(seq, 0)
                demand(held != effect.lease.fencing_token, f"{effect.lease} is recorded and its lease is still on disk")


def one_dead_letter(
    machine: QueueMachine, runs: Mapping[str, tuple[LeaseRef, RequestMeta]], names: Iterable[str]
) -> None:
    """Of what an engine dies with, and another died with before, one becomes a dead letter at most."""
    most = machine._workers._rules.max_attempts
    running = [machine.book.leased(runs[name][0]) for name in names if name in runs]
    last = [entry.name for entry in running if entry is not None and entry.engine_died and entry.attempts >= most]
    demand(len(last) <= 1, f"an engine dies with {last}, all of them on their last attempt")


class SchedulerReferee:
    """Keeps books of its own from the scheduler's effects, and holds its ledgers against them."""

    def __init__(self, machine: SchedulerMachine) -> None:
        """Begin with a scheduler that knows nothing."""
        self._machine = machine
        self._held: dict[int, dict[str, int]] = {}
        self._capacity_blocks: dict[int, int] = {}
        self._overcommits: set[int] = set()
        """Epochs that may hold more than there is: they said so, or their reservations follow the output."""
        self._displacing: set[int] = set()
        """Epochs whose engines run what is guaranteed first."""
        self._channels: dict[str, str] = {}
        """Of every request that was granted."""
        self._last: dict[int, set[str]] = {}
        """Those on their last attempt, by the epoch that they were brought along or granted to."""

    def stepped(self, message: m.Input, effects: Sequence[m.Effect]) -> None:
        """Take one step with its effects."""
        if isinstance(message, m.WorkerOpened):
            self._held[message.epoch] = {holding.request_id: holding.held_blocks for holding in message.inventory}
            self._capacity_blocks[message.epoch] = message.shape.capacity_blocks
            self._channels |= {holding.request_id: holding.channel for holding in message.inventory}
            self._last[message.epoch] = {holding.request_id for holding in message.inventory if holding.last_attempt}
            if message.guaranteed_first:
                self._displacing.add(message.epoch)
            if sum(self._held[message.epoch].values()) > message.shape.capacity_blocks:
                self._overcommits.add(message.epoch)
        if isinstance(message, m.GrantUsed) and any(isinstance(effect, m.Met) for effect in effects):
            del self._held[message.epoch][message.grant]
        self._take(effects)

    def _could_start(self, entry: Entry, now_ns: int) -> bool:
        """Return whether a worker that takes grants could hold the request if there were room."""
        bookings = Bookings(self._machine.policy, self._machine.fleet)
        return any(
            worker.takes_grants(now_ns)
            and worker.shape.capacity_blocks >= max(blocks, least_blocks)
            and not (entry.announced.last_attempt and self._has_last(worker))
            for group, blocks, least_blocks in bookings.of(entry)
            for worker in group.workers.values()
        )

    def _has_last(self, worker: Worker) -> bool:
        """Return whether one on its last attempt runs on the worker, or saves there."""
        saving = self._machine._arbiter._savings.on(worker)
        return worker.ledger.last_attempts > 0 or (saving is not None and saving.entry.announced.last_attempt)

    def _take(self, effects: Sequence[m.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, m.Grant):
                held = self._held[effect.epoch]
                demand(effect.request_id not in held, f"{effect.request_id} was booked twice in epoch {effect.epoch}")
                bookable_blocks = self._bookable_blocks(effect)
                demand(effect.booked_blocks <= bookable_blocks, f"{effect} books more than {bookable_blocks}")
                held[effect.request_id] = effect.booked_blocks
                self._channels[effect.request_id] = effect.channel
                if effect.last_attempt:
                    others = self._last[effect.epoch]
                    demand(not others, f"{effect} shares its worker with {others}, on its last attempt as well")
                    others.add(effect.request_id)
                if effect.standing is not None:
                    waiting = [e for e in self._machine.backlog.entries() if e.state is State.WAITING]
                    helped = [e for e in waiting if self._could_start(e, effect.announced_ns)]
                    demand(not helped, f"{effect} was given while {helped[:1]} waits")
            elif isinstance(effect, m.Met):
                held = self._held[effect.epoch]
                demand(effect.request.request_id not in held, f"{effect} has credits already")
                held[effect.request.request_id] = effect.booked_blocks
            elif isinstance(effect, m.Settled):
                self._held[effect.epoch][effect.request_id] = effect.held_blocks
            elif isinstance(effect, m.Released):
                held_blocks = self._held[effect.epoch].pop(effect.request_id)
                self._last[effect.epoch].discard(effect.request_id)
                demand(held_blocks == effect.released_blocks, f"{effect} released what was not held: {held_blocks}")
            elif isinstance(effect, m.AuditFailed):
                demand(False, f"the scheduler's audit: {effect.violations}")

    def _bookable_blocks(self, grant: m.Grant) -> int:
        """Return the most that a grant may book, also where reservations grow: they were granted before.

        That is what is free, and where others hold blocks the share that the policy books ahead. Where engines preempt,
        and run what is guaranteed first, it is what is left of the guarantee, whoever holds that.
        """
        capacity_blocks, held = self._capacity_blocks[grant.epoch], self._held[grant.epoch]
        policy = self._machine.policy
        ahead_blocks = int(policy.ahead_share * capacity_blocks) if held else 0
        bookable_blocks = min(capacity_blocks - sum(held.values()) + ahead_blocks, capacity_blocks)
        if not (grant.guaranteed and policy.reserve_output_tokens and grant.epoch in self._displacing):
            return bookable_blocks
        guaranteed_blocks = self._machine.channel(grant.channel).share.guaranteed_blocks(capacity_blocks)
        used = (blocks for name, blocks in held.items() if self._channels.get(name) == grant.channel)
        return max(bookable_blocks, guaranteed_blocks - sum(used))

    def arbitrated(self, grants: Sequence[m.Effect]) -> None:
        """Take a pass of grants; then hold every ledger and the order of the grants against the law."""
        self._take(grants)
        self._check_ledgers()
        if grants:
            self._check_order([grant for grant in grants if isinstance(grant, m.Grant) and grant.standing is None])

    def _check_ledgers(self) -> None:
        for worker in self._machine.fleet:
            ledger = worker.ledger
            held_blocks = sum(self._held[worker.epoch].values())
            demand(len(ledger) == len(self._held[worker.epoch]), f"{worker.worker_id}: reservations differ")
            balance = ledger.free_blocks - ledger.overcommitted_blocks + held_blocks
            demand(balance == ledger.capacity_blocks, f"{worker.worker_id}: credits were minted or lost")
            if not self._machine.policy.reserve_output_tokens and worker.epoch not in self._overcommits:
                demand(held_blocks <= ledger.capacity_blocks, f"{worker.worker_id} holds more than there is")

    # ---- order ----

    def _check_order(self, grants: Sequence[m.Grant]) -> None:
        """In its line (one channel, one model) a request is granted first, or it passes a head that saves.

        Lines are ordered by (priority, submit). Nobody passes more than FRONT_REQUESTS - 1 others. What is not
        guaranteed passes only a head with a booked start, one that its worker could never hold or may not take now, or
        one that was granted itself in the same pass. Those out of reach of the workers that take grants do not count,
        nor do those on their last attempt that wait for a worker which has no other, or behind such a one.
        """
        lines: dict[tuple[str, str], list[Entry]] = {}
        granted = {grant.request_id for grant in grants}
        for entry in self._machine.backlog.entries():
            if entry.request is None:
                continue
            waits = entry.state is State.WAITING and not self._waits_for_last(entry)
            if entry.request_id in granted or (waits and not self._is_out_of_reach(entry)):
                lines.setdefault(self._line_of(entry), []).append(entry)
        for line in lines.values():
            line.sort(key=_turn)
        saving = {saving.entry.request_id for saving in self._machine._arbiter._savings}
        for grant in grants:
            known = self._machine.backlog.get(grant.request_id)
            assert known is not None
            line = lines[self._line_of(known)]
            rank = line.index(known)
            demand(rank < FRONT_REQUESTS, f"{grant.request_id} passed {rank} others")
            head = line[0]
            passed = rank > 0 and head.state is State.WAITING and not grant.guaranteed
            not_there = self._is_too_small(grant.epoch, head) or self._is_beside_last(grant.epoch, head)
            kept = passed and head.request_id not in saving and not not_there
            demand(not kept, f"{grant.request_id} passed a head without a booked start")
            line.remove(known)

    def _waits_for_last(self, entry: Entry) -> bool:
        """Return whether the entry is aside as it is on its last attempt, which no worker must be free to take."""
        line = self._machine.channel(entry.announced.channel).lines[entry.announced.model]
        if not entry.announced.last_attempt or entry.request_id not in line._aside:
            return entry.request_id in line._behind_last
        free = self._could_start(entry, self._machine._arbiter._now_ns)
        demand(not free, f"{entry.request_id} waits for a worker that would take it on its last attempt")
        return True

    def _is_too_small(self, epoch: int, entry: Entry) -> bool:
        """Return whether the worker could not hold what the entry books, which may be more than it is known to need."""
        worker = self._machine.fleet.get(epoch)
        if worker is None:
            return False
        booked = self._machine.policy.booking_blocks(entry.announced, worker.shape)
        return worker.shape.capacity_blocks < max(booked, needed_blocks(entry.announced, worker.shape))

    def _is_beside_last(self, epoch: int, entry: Entry) -> bool:
        """Return whether the entry may not run on the worker, as that runs another on its last attempt."""
        return entry.announced.last_attempt and bool(self._last[epoch])

    def _is_out_of_reach(self, entry: Entry) -> bool:
        """Return whether the largest workers that serve the entry take no grants, or not even they could hold it."""
        request, now_ns = entry.announced, self._machine._arbiter._now_ns
        shapes = {w: w.shape for w in self._machine.fleet if request.model in ("", *w.models)}
        largest = max((shape.capacity_blocks for shape in shapes.values()), default=0)
        return not any(
            worker.takes_grants(now_ns) and largest == shape.capacity_blocks >= needed_blocks(request, shape)
            for worker, shape in shapes.items()
        )

    def _line_of(self, entry: Entry) -> tuple[str, str]:
        channel = entry.announced.channel if self._machine.policy.channels_apart else ""
        return channel, entry.announced.model

    # ---- epochs ----

    def picture(self) -> tuple[object, ...]:
        """Return all that a message of an old epoch could change: ledgers, reports, the backlog."""
        workers = tuple(
            (w.epoch, w.ledger.free_blocks, w.ledger.overcommitted_blocks, len(w.ledger), w.draining, w.report)
            for w in self._machine.fleet
        )
        return workers, tuple((entry.request_id, entry.state) for entry in self._machine.backlog.entries())

    def is_stale(self, message: m.Input) -> bool:
        """Return whether the message names an epoch that is over or not its stream's."""
        if not isinstance(message, m.TokenizerAck | m.GrantUsed | m.CompletionAck | m.EngineReport):
            return False
        return message.stream != message.epoch or self._machine.fleet.get(message.epoch) is None


def _turn(entry: Entry) -> tuple[int, int]:
    """Return what a line is promised to be ordered by: priority, then the number that the queue gave at the submit."""
    assert entry.announced is not None
    return entry.announced.priority, parse_request_id(STORE_ID, entry.request_id)
