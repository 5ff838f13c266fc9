"""Whose request is granted next, and on which worker.

Channels take turns by deficit round robin in blocks. A round gives every
channel with work a quantum proportional to its weight; a grant is charged what
it books, and the tokenizer ACK gives back what was booked too much, so over
time channels that always have work receive blocks in proportion to weight. A new
round begins only when every channel that could be served has used up its deficit.

What a channel may take of one worker:

- never past its ceiling, except that a channel holding nothing there may always start one request (or a
  request larger than the ceiling could never run);
- up to its guarantee, whatever others want: that part is fenced off from the others while it has work here;
- beyond that, whatever neither a fence nor a saving keeps.

**Nobody starves.** A head that can pay but fits nowhere *saves* on the worker with
most room: until it is granted, other channels get nothing there beyond their own
guarantees, so as running requests end their blocks pile up for it. Guarantees
that would leave the head too little room bend, in proportion, while it saves.
Nothing else can be booked on that worker forever, hence a saving head waits at most for
what ran there when it began to save. One head saves per worker, the first in
the ring that can pay. Another that can pay waits for the savings before it, of which
there are finitely many: no round begins, so no deficit grows, while a head that can pay is waiting.

**Nothing idles for fairness' sake.** While those that can pay do not fit, a head that
fits now is lent the blocks beyond its deficit; the debt is bounded, so that a channel
that used idle workers is not shut out for long when others return.

A pass costs O(channels x workers) per grant and does not depend on how many wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.backlog import Entry
from services.scheduler.core.channel import Channel, Line
from services.scheduler.core.estimate import could_hold
from services.scheduler.core.fleet import Fleet, Worker
from services.scheduler.core.policy import Policy

QUANTUM_BLOCKS = 8
"""Blocks a round gives the channel of least weight: small against a request, so that turns interleave finely."""

DEBT_ROUNDS = 8
"""Most rounds a channel can owe for blocks it was lent: a lender that returns waits for few requests."""


def quantum_blocks(weight: float, least_weight: float) -> int:
    """Return what one round gives a channel of `weight`, in blocks."""
    return max(round(QUANTUM_BLOCKS * weight / least_weight), 1)


class Placement(NamedTuple):
    """Grant this entry on this worker, booking `blocks`."""

    entry: Entry
    channel: Channel
    worker: Worker
    blocks: int


class Saving(NamedTuple):
    """A head for which freed blocks of one worker are kept."""

    entry: Entry
    channel: Channel
    line: Line
    blocks: int


class Offer(NamedTuple):
    """Where a head could go: `worker` has room for `blocks` now, or is where it may save (None: all are taken)."""

    worker: Worker | None
    blocks: int
    fits: bool


@dataclass(slots=True)
class Survey:
    """What one look around the ring found.

    `hungry` channels cannot pay for their head (with its cost in blocks); `lendable` is the first of those heads that
    fits now; `payer_waits` tells that a head could pay and fits nowhere.
    """

    hungry: list[tuple[Channel, int]]
    placement: Placement | None = None
    lendable: Placement | None = None
    payer_waits: bool = False
    began_to_save: bool = False


class Arbiter:
    """Deficit round robin over channels, with guarantees, ceilings and savings. Owns the savings."""

    def __init__(self, policy: Policy, fleet: Fleet, channels: Iterable[Channel]) -> None:
        """Arbitrate over `channels`, which are taken in this order within a round."""
        self._policy = policy
        self._fleet = fleet
        self._ring = list(channels)
        self._savings: dict[int, Saving] = {}
        self._now_ns = 0
        self._serving: dict[str, list[Worker]] = {}
        self._stuck: dict[str, Offer] = {}

    def add(self, channel: Channel) -> None:
        """Take one more channel into the ring."""
        self._ring.append(channel)

    def saving_on(self, worker: Worker) -> Saving | None:
        """Return the head that saves on the worker, None if none does."""
        return self._savings.get(worker.epoch)

    def begin(self, now_ns: int) -> None:
        """Start a pass: see who takes grants, and forget savings whose head or worker is no longer there."""
        self._now_ns = now_ns
        self._serving.clear()
        self._stuck.clear()
        takers = {worker.epoch for worker in self._fleet if worker.takes_grants(now_ns)}
        for epoch, saving in list(self._savings.items()):
            still_first = (
                saving.channel.lines.get(saving.line.model) is saving.line and saving.line.head() is saving.entry
            )
            if epoch not in takers or not still_first or saving.channel.deficit_blocks < saving.blocks:
                del self._savings[epoch]

    def next(self) -> Placement | None:
        """Return the next grant of this pass, None if nothing more fits. `placed` must follow each placement."""
        while True:
            survey = Survey([])
            for channel in self._ring:
                self._survey(channel, survey)
                if survey.placement is not None:
                    return survey.placement
            if survey.began_to_save:
                continue  # guarantees may have bent for the new saving: look again
            if survey.payer_waits or not survey.hungry:
                return survey.lendable
            self._begin_rounds(survey.hungry)

    def placed(self, placement: Placement) -> None:
        """Charge a placement that was booked; the entry must still be in its line."""
        channel = placement.channel
        self.charge(channel, placement.blocks)
        saved_on = [epoch for epoch, saving in self._savings.items() if saving.entry is placement.entry]
        for epoch in saved_on:
            del self._savings[epoch]
        # Only these two give others more room than they had a moment ago; every other booking takes room away.
        if saved_on or len(channel.lines[placement.entry.announced.model]) == 1:
            self._stuck.clear()

    @staticmethod
    def charge(channel: Channel, blocks: int) -> None:
        """Let the channel pay for blocks; what it cannot pay it owes, up to a bound."""
        channel.charge(blocks, DEBT_ROUNDS * channel.quantum_blocks)

    def _survey(self, channel: Channel, survey: Survey) -> None:
        """Look at the channel's heads in order, until one can be placed or cannot pay."""
        for line, head in channel.heads():
            offer = self._offer(channel, line, head)
            if offer is None:
                continue
            placement = Placement(head, channel, offer.worker, offer.blocks) if offer.fits and offer.worker else None
            if channel.deficit_blocks < offer.blocks:
                survey.hungry.append((channel, offer.blocks))
                survey.lendable = survey.lendable or placement
                return
            if placement is not None:
                survey.placement = placement
                return
            survey.payer_waits = True
            survey.began_to_save |= self._save(channel, line, head, offer)

    # ---- rounds ----

    @staticmethod
    def _begin_rounds(hungry: list[tuple[Channel, int]]) -> None:
        """Give as many rounds at once as it takes until one channel can pay."""
        rounds = min(-((channel.deficit_blocks - cost) // channel.quantum_blocks) for channel, cost in hungry)
        for channel, _ in hungry:
            channel.deficit_blocks += rounds * channel.quantum_blocks

    # ---- room ----

    def _offer(self, channel: Channel, line: Line, head: Entry) -> Offer | None:
        """Return where the head could go, None if no worker may take it whatever is free."""
        stuck = self._stuck.get(head.request_id)
        if stuck is not None:
            return stuck
        best: Offer | None = None
        best_rank: tuple[bool, bool, int] = (False, False, -1)
        for worker, blocks in self._candidates(head, line.model):
            room = self._policy.room_blocks(head.announced, worker, blocks)
            if best_rank[0] and room <= best_rank[2]:
                continue  # cannot be better than what fits already
            if head.request_id in worker.ledger or not below_ceiling(worker, channel, blocks):
                continue
            saving = self._savings.get(worker.epoch)
            fits = blocks <= room and self._fits(worker, channel, line, blocks, room, head.announced.n)
            open_to_save = saving is None or saving.entry is head
            rank = (fits, open_to_save, room)
            if best is None or rank > best_rank:
                best, best_rank = Offer(worker if fits or open_to_save else None, blocks, fits), rank
        if best is not None and not best.fits:
            self._stuck[head.request_id] = best
        return best

    def _save(self, channel: Channel, line: Line, head: Entry, offer: Offer) -> bool:
        """Keep what is freed on the offered worker for this head; False if it saves already or nowhere can."""
        if offer.worker is None or any(saving.entry is head for saving in self._savings.values()):
            return False
        if offer.worker.epoch in self._savings:
            return False
        self._savings[offer.worker.epoch] = Saving(head, channel, line, offer.blocks)
        self._stuck.clear()
        return True

    def _candidates(self, head: Entry, model: str) -> list[tuple[Worker, int]]:
        """Return the workers that take grants now and may get the head, with the blocks each would book.

        Those that can hold all the policy books come before any other, also while they are full or away: a smaller one
        might have to reject what they could run. If none can, the largest books all it has.
        """
        workers = self._serving.get(model)
        if workers is None:
            workers = self._serving[model] = self._fleet.serving(model)
        wanted = [(worker, blocks) for worker in workers if (blocks := self._booking(head, worker))]
        roomy = [pair for pair in wanted if pair[1] <= pair[0].shape.capacity_blocks]
        if not roomy and wanted:
            largest = max(worker.shape.capacity_blocks for worker, _ in wanted)
            roomy = [(worker, largest) for worker, _ in wanted if worker.shape.capacity_blocks == largest]
        return [pair for pair in roomy if pair[0].takes_grants(self._now_ns)]

    def _booking(self, head: Entry, worker: Worker) -> int:
        """Return what the policy books for the head on the worker; 0 if it is proven that the worker cannot hold it."""
        blocks = head.bookings.get(worker.shape)
        if blocks is None:
            blocks = 0
            if could_hold(head.announced, worker.shape):
                blocks = max(self._policy.booking_blocks(head.announced, worker.shape), 1)
            head.bookings[worker.shape] = blocks
        return blocks

    def _fits(self, worker: Worker, channel: Channel, line: Line, blocks: int, room: int, sequences: int) -> bool:
        """Return whether `blocks` of the `room` there is may go to this line."""
        saving = self._savings.get(worker.epoch)
        own_saving = saving is not None and saving.line is line
        kept_sequences = 0 if saving is None or own_saving else max(saving.entry.announced.n, 1)
        if not sequences_fit(worker, sequences + kept_sequences):
            return False
        if saving is not None and saving.channel is channel and not own_saving:
            return False
        if worker.ledger.held_by(channel.name) + blocks <= self._guarantee(worker, channel):
            return True
        if saving is not None and not own_saving:
            return False
        return blocks <= room - self._fence(worker, channel)

    def _fence(self, worker: Worker, channel: Channel) -> int:
        """Return the blocks kept for the unused guarantees of other channels that have work for the worker."""
        return sum(
            max(self._guarantee(worker, other) - worker.ledger.held_by(other.name), 0)
            for other in self._ring
            if other is not channel and other.share.guaranteed_share and has_work_for(other, worker)
        )

    def _guarantee(self, worker: Worker, channel: Channel) -> int:
        """Return the channel's guarantee on the worker, bent if a saving head would not fit beside all of them."""
        capacity = worker.shape.capacity_blocks
        guaranteed = channel.share.guaranteed_blocks(capacity)
        saving = self._savings.get(worker.epoch)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        room = capacity - saving.blocks
        others = sum(other.share.guaranteed_blocks(capacity) for other in self._ring if other is not saving.channel)
        return guaranteed if others <= room else guaranteed * room // others


def below_ceiling(worker: Worker, channel: Channel, blocks: int) -> bool:
    """Return whether the channel may hold `blocks` more of the worker; its first request there always may."""
    if channel.share.ceiling_share >= 1:
        return True  # then only room limits it, and room that is merely taken is worth saving for
    held = worker.ledger.held_by(channel.name)
    return not held or held + blocks <= channel.share.ceiling_blocks(worker.shape.capacity_blocks)


def sequences_fit(worker: Worker, sequences: int) -> bool:
    """Return whether the engine can run that many completions more; an idle one takes any request."""
    return not worker.ledger.sequences or worker.ledger.sequences + sequences <= worker.most_sequences


def has_work_for(channel: Channel, worker: Worker) -> bool:
    """Return whether a request that the worker could serve waits in the channel."""
    return any(worker.serves(model) for model in channel.lines)
