"""Gives, recalls and hands on standing grants (`standing`): the part that touches workers and their ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from services.core.value import Value
from services.scheduler.core import messages as m
from services.scheduler.core.admission.estimate import needed_blocks
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.backlog import Backlog
from services.scheduler.core.fleet import Fleet, Group, Worker
from services.scheduler.core.roster import Roster
from services.scheduler.core.sharing.arbiter import Arbiter
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.openings import kind_of
from services.scheduler.core.sharing.rules import Spare, below_ceiling
from services.scheduler.core.standing import (
    FREE_PER_GRANT,
    LOOKS,
    PREFIX,
    RETURNED_PAUSE_NS,
    ROOMIER,
    WORKER_LOOKS,
    Given,
    Kind,
    Most,
    Standing,
    template,
)


class Place(Value):
    """Where a standing grant may be given, for which requests, and what it would book."""

    def __init__(self, worker: Worker, most: Most, request: m.Announced, blocks: int) -> None:
        self.worker, self.most, self.request, self.blocks = worker, most, request, blocks


class StandBy:
    """Keeps a grant standing for each kind of request that came lately, while nothing waits."""

    def __init__(self, lifetime_ns: int, policy: Policy, fleet: Fleet, arbiter: Arbiter) -> None:
        """Let each stand unused for `lifetime_ns`; 0 gives none, and so does a policy whose bookings do not settle."""
        self._standing = Standing(lifetime_ns if policy.settles else 0)
        self._policy = policy
        self._fleet = fleet
        self._arbiter = arbiter

    def came(self, request: m.Announced, now_ns: int) -> list[m.Recall]:
        """Note a request that was granted; return what must be recalled, for it was too small."""
        return _recalls(self._standing.came(request, now_ns))

    def look(self, backlog: Backlog, roster: Roster, now_ns: int) -> Iterable[m.Grant | m.Recall]:
        """Give what should stand and does not, or recall everything, because somebody waits for room."""
        if not self._standing.in_use:
            return ()
        if any(backlog.waiting.values()) and self._can_be_helped(roster):
            return _recalls(self._standing.waits(now_ns))
        missing = [
            (kind, most, channel)
            for kind, most in self._standing.missing(now_ns)
            if kind.model not in (channel := roster.channel(kind.channel)).lines  # else the queue lets nobody meet it
        ]
        given = (self._give(kind, most, channel, now_ns) for kind, most, channel in missing)
        return [grant for grant in given if grant is not None]

    def _can_be_helped(self, roster: Roster) -> bool:
        """Return whether somebody waits who could have what is recalled; of many lines some are taken to be such."""
        lines = ((channel, line) for channel in roster.channels.values() for line in channel.lines.values())
        return any(count == LOOKS or self._arbiter.may_start(*pair) for count, pair in enumerate(lines))

    def tick(self, roster: Roster, now_ns: int) -> Iterator[m.Recall]:
        """Yield what has stood unused for long, and what would be given elsewhere by now."""
        yield from _recalls(self._standing.unused(now_ns))
        for name, given in self._standing.out():
            if self._is_misplaced(name, given, roster.channel(given.kind.channel), now_ns):
                yield from _recalls(self._standing.misplaced(name))

    def _is_misplaced(self, name: str, given: Given, channel: Channel, now_ns: int) -> bool:
        """Return whether another worker has clearly more room for what the grant is for."""
        worker = self._fleet.get(given.epoch)
        reservation = None if worker is None else worker.ledger.reservation(name)
        best = self._best_place(given.kind, given.most, channel, now_ns)
        if worker is None or reservation is None or best is None:
            return False
        return best.worker.usable_blocks > ROOMIER * (worker.usable_blocks + reservation.held_blocks)

    def _give(self, kind: Kind, most: Most, channel: Channel, now_ns: int) -> m.Grant | None:
        """Book the largest request that the grant is for, where there is most room; None if there is none to spare."""
        place = self._best_place(kind, most, channel, now_ns)
        if place is None:
            self._standing.nowhere(kind, now_ns)
            return None
        worker, most, blocks = place.worker, place.most, place.blocks
        name = self._standing.give(worker.epoch, kind, most, now_ns)
        request = place.request.replace(request_id=name)
        guaranteed = self._arbiter.goes_first(worker, channel, place.request, blocks)
        if not worker.ledger.book(name, kind.channel, blocks, guaranteed=guaranteed):
            raise RuntimeError(f"{blocks} blocks cannot be booked for {name}, where there was room for more")
        self._policy.booked(worker, request, blocks, None)
        return m.Grant(
            epoch=worker.epoch,
            worker_id=worker.worker_id,
            request_id=name,
            channel=kind.channel,
            booked_blocks=blocks,
            settles=self._policy.settles,
            attempt=0,
            traceparent="",
            announced_ns=now_ns,
            reserve_output_tokens=self._policy.reserve_output_tokens,
            standing=request,
            guaranteed=guaranteed,
        )

    def _best_place(self, kind: Kind, most: Most, channel: Channel, now_ns: int) -> Place | None:
        """Return the roomiest worker that can spare what the largest request of the kind books, and could run it."""
        groups = self._fleet.serving(kind.model)
        # Of the largest window: where a smaller one cannot hold it, it would be outgrown by what is run elsewhere.
        most = most.within(max((group.shape.max_model_len for group in groups), default=1))
        places = (place for group in groups for place in self._places(group, kind, most, channel, now_ns))
        return max(places, key=lambda place: place.worker.usable_blocks, default=None)

    def _places(self, group: Group, kind: Kind, most: Most, channel: Channel, now_ns: int) -> Iterator[Place]:
        request = template(PREFIX + repr((kind, most)), kind, most)
        needed = needed_blocks(request, group.shape)
        blocks = max(self._policy.booking_blocks(request, group.shape), 1)
        asked = kind_of(request, self._policy.reserve_output_tokens > 0)
        able = (
            worker
            for worker in channel.openings(group, asked).roomiest_first(blocks, now_ns)
            if worker.takes_standing and now_ns >= worker.standing_paused_until_ns
        )
        for worker in islice(able, WORKER_LOOKS):
            if needed > worker.shape.capacity_blocks or not below_ceiling(worker, channel, blocks):
                continue
            spare = self._arbiter.spare(worker, channel, now_ns)
            if not self._can_spare(worker, spare, blocks):
                continue
            if self._policy.room_blocks(request, worker, blocks) - spare.kept_of_peak_blocks >= blocks:
                yield Place(worker, most, request, blocks)

    def _can_spare(self, worker: Worker, spare: Spare, blocks: int) -> bool:
        out = [worker.ledger.reservation(name) for name in self._standing.on(worker.epoch)]
        out_blocks = sum(reservation.held_blocks for reservation in out if reservation is not None)
        return FREE_PER_GRANT * (out_blocks + blocks) <= spare.blocks + out_blocks and FREE_PER_GRANT * (
            len(out) + 1
        ) <= spare.sequences + len(out)

    def used(self, worker: Worker, grant: str, request: m.Announced) -> m.Met | None:
        """Give the credits of a standing grant to the request that it met; None if it has none."""
        reservation = worker.ledger.reservation(grant)
        standing = grant.startswith(PREFIX) and not request.request_id.startswith(PREFIX)
        if not standing or reservation is None or not worker.ledger.rename(grant, request.request_id):
            return None
        # Its channel is that of the grant, whatever the worker says.
        request = request.replace(channel=reservation.channel)
        self._standing.ended(grant)
        self._policy.met(worker, grant, request, reservation.held_blocks)
        return m.Met(worker.epoch, worker.worker_id, request, reservation.held_blocks)

    def ended(self, worker: Worker, name: str, now_ns: int) -> None:
        """Note that credits came home, of whatever; a worker that was not asked for them cannot offer any."""
        if name.startswith(PREFIX) and self._standing.ended(name):
            worker.standing_paused_until_ns = now_ns + RETURNED_PAUSE_NS

    def closed(self, worker: Worker) -> None:
        """Note that the stream of a worker has ended."""
        self._standing.closed(worker.epoch)


def of_earlier(inventory: Iterable[m.Holding]) -> set[str]:
    """Return the standing grants in what a worker brings along: of an epoch that is over, and to be recalled."""
    return {holding.request_id for holding in inventory if holding.request_id.startswith(PREFIX)}


def _recalls(names: Iterable[tuple[int, str]]) -> list[m.Recall]:
    return [m.Recall(epoch, name) for epoch, name in names]
