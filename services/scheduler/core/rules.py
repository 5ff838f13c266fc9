"""What a channel may take of one worker, whatever is free there: ceiling, guarantees, sequences, savings.

A guarantee is a part of a worker's blocks and the same part of its sequences. It counts what requests are expected
to grow to: under a policy that books little at first, so many could be let in for what they book that they would
outgrow it together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

from services.scheduler.core.backlog import Entry
from services.scheduler.core.bookings import Bookings
from services.scheduler.core.channel import Channel
from services.scheduler.core.fleet import Worker
from services.scheduler.core.largest import Largest
from services.scheduler.core.lately import Lately
from services.scheduler.core.ledger import Reservation
from services.scheduler.core.messages import Announced
from services.scheduler.core.policy import Policy
from services.scheduler.core.savings import Saving, Savings
from services.scheduler.core.standing import PREFIX

KEPT_PART: Final = 16
"""Part of a worker's blocks kept of the predicted peak beside a guarantee in use, on top of what it used lately.

A hundred long outputs at once are off by a few hundredths of the cache from what is expected of them. With nothing kept
engines that run what is guaranteed first preempt for it 98 times in 1,000 requests, with a sixteenth 20 times, with an
eighth 13 times, and others have 0.98 of their tokens/s instead of 0.995 (`benchmarks.admission.isolation`)."""

ADMISSION_PART: Final = 32
"""Part of a worker's blocks that is counted as kept free when its engine takes a request in: vLLM's watermark is 0.02
unless its user says otherwise."""


class Claim(enum.Enum):
    """How a channel may have blocks of a worker."""

    SHUT = "shut"  # nothing of this channel gets in until something ends there
    REFUSED = "refused"  # not so many blocks until something ends there
    GUARANTEED = "guaranteed"  # within its guarantee, whatever others want
    SHARED = "shared"  # from what neither a fence nor a saving keeps


class Spare(NamedTuple):
    """What is left of a worker for one channel; of the predicted peak `kept_of_peak_blocks` are kept from it."""

    blocks: int
    sequences: int
    kept_of_peak_blocks: int


class Rules:
    """Ceilings, guarantees and savings. Reads the channels, owns what guarantees were used lately."""

    def __init__(self, savings: Savings, policy: Policy, bookings: Bookings) -> None:
        """Apply the rules to channels that are added."""
        self._savings = savings
        self._policy = policy
        self._bookings = bookings
        self._grows = policy.reserve_output_tokens > 0
        self._guaranteed: list[Channel] = []
        self._lately: dict[int, dict[str, Lately]] = {}
        self._behind = Largest()
        """What does not go first."""

    def add(self, channel: Channel) -> None:
        """Take one more channel into account."""
        if channel.share.guaranteed_share:
            self._guaranteed.append(channel)

    def reshared(self, channels: Sequence[Channel]) -> None:
        """Take the shares that `channels`, all there are, have now."""
        self._guaranteed = [channel for channel in channels if channel.share.guaranteed_share]

    # ---- claims ----

    def claim(self, worker: Worker, channel: Channel, entry: Entry, blocks: int, now_ns: int) -> Claim:
        """Return how the entry may have `blocks` of the worker, if they are free."""
        if not below_ceiling(worker, channel, blocks):
            return Claim.REFUSED
        saving = self._savings.on(worker)
        if saving is not None and not saving.binds(channel, entry):
            saving = None
        within = self.is_within(worker, channel, entry.announced, blocks)
        if not self._sequences_are_left(worker, channel, entry, saving, within, now_ns):
            return Claim.REFUSED if sequences_fit(worker, 1) else Claim.SHUT
        if saving is not None:
            if saving.start_ns is None:
                self._savings.book_start(saving, self.fence(worker, saving.channel, now_ns), now_ns)
            passes = within and (saving.channel is not channel or self._fits_beside(worker, saving))
            if not passes and not self._savings.lets_pass(saving, channel, blocks, now_ns):
                shut = self._savings.is_due(saving, now_ns) and not channel.share.guaranteed_share
                return Claim.SHUT if shut else Claim.REFUSED
        return Claim.GUARANTEED if within else Claim.SHARED

    def room(
        self, worker: Worker, channel: Channel, entry: Entry, blocks: int, claim: Claim, now_ns: int
    ) -> tuple[int, int]:
        """Return how large a booking the claim has room for, and the blocks that a fence keeps from it."""
        policy, request = self._policy, entry.announced
        if claim is Claim.GUARANTEED:
            # Whatever is expected of the worker; but of two the one of which less is expected is the roomier.
            room = worker.usable_blocks
            return (room if room < blocks else max(policy.room_blocks(request, worker, blocks), blocks)), 0
        if claim is not Claim.SHARED:
            return 0, 0
        if not self.guards(channel):
            room = worker.usable_blocks
            return (room if room < blocks else policy.room_blocks(request, worker, blocks)), 0
        fence = self.fence(worker, channel, now_ns)
        room = worker.usable_blocks - fence
        if room >= blocks:
            due = self._is_due(worker, channel, entry, now_ns)
            room = policy.room_blocks(request, worker, blocks, due) - self._fence_of_peak(worker, channel, now_ns)
        return room, fence

    def _is_due(self, worker: Worker, channel: Channel, entry: Entry, now_ns: int) -> bool:
        """Return whether the entry's start on the worker was booked for now, beside guarantees of others in use."""
        saving = self._savings.of(entry)
        if saving is None or saving.worker is not worker or not self._savings.is_due(saving, now_ns):
            return False
        held_by = worker.ledger.held_by
        return any(other is not channel and held_by(other.name) for other in self._guaranteed)

    def opened(self, worker: Worker) -> None:
        """Note what a worker brings along that does not go first there."""
        for request_id in worker.ledger:
            reservation = worker.ledger.reservation(request_id)
            if reservation is not None and not reservation.guaranteed and not request_id.startswith(PREFIX):
                self._behind.began(worker.epoch, request_id, _of_one(reservation, reservation.held_blocks))

    def granted(self, worker: Worker, channel: Channel, request_id: str, peak_blocks: int, now_ns: int) -> None:
        """Note a request, booked, that is expected to hold so many blocks at its fullest."""
        reservation = worker.ledger.reservation(request_id)
        if reservation is not None and not reservation.guaranteed:
            self._behind.began(worker.epoch, request_id, _of_one(reservation, peak_blocks))
        self.note_use(worker, channel, now_ns)

    def holds(self, worker: Worker, request_id: str, held_blocks: int) -> None:
        """Note what a request holds."""
        reservation = worker.ledger.reservation(request_id)
        if reservation is not None:
            self._behind.holds(worker.epoch, request_id, _of_one(reservation, held_blocks))

    def ended(self, worker: Worker, request_id: str) -> None:
        """Note that a request holds nothing any more."""
        self._behind.ended(worker.epoch, request_id)

    def note_use(self, worker: Worker, channel: Channel, now_ns: int) -> None:
        """Note that the channel holds more of the worker than before."""
        if channel.share.guaranteed_share:
            by_channel = self._lately.setdefault(worker.epoch, {})
            lately = by_channel.get(channel.name)
            if lately is None:
                lately = by_channel[channel.name] = Lately(now_ns)
            ledger, name = worker.ledger, channel.name
            lately.note(ledger.held_by(name), ledger.sequences_of(name), now_ns, channel.hold_time.mean_ns)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._lately.pop(worker.epoch, None)
        self._behind.forget(worker.epoch)

    def is_within(self, worker: Worker, channel: Channel, request: Announced, blocks: int) -> bool:
        """Return whether the channel stays within its guarantee with the request, now and at its fullest."""
        if not channel.share.guaranteed_share:
            return False
        guarantee = self.guarantee(worker, channel)
        if worker.ledger.held_by(channel.name) + blocks > guarantee:
            return False
        policy = self._policy
        peak_blocks = policy.peak_blocks(request, worker, blocks)
        return policy.expected_of(worker, channel.name) + peak_blocks <= guarantee

    def _fits_beside(self, worker: Worker, saving: Saving) -> bool:
        """Return whether a saving head has room beside all guarantees in use, its own channel's too, below its ceiling.

        Those of the others are bent to the room beside the head alone.
        """
        own, capacity = saving.channel, worker.shape.capacity_blocks
        if saving.peak_blocks + self.guarantee(worker, own) > own.share.ceiling_blocks(capacity):
            return False
        blocks = sum(self.guarantee(worker, channel) for channel in self._guaranteed)
        sequences = sum(self._sequences(worker, channel, 1) for channel in self._guaranteed)
        wanted = max(saving.entry.announced.n, 1)
        return saving.peak_blocks + blocks <= capacity and wanted + sequences <= worker.most_sequences

    def goes_first(self, worker: Worker, channel: Channel, request: Announced, blocks: int) -> bool:
        """Return whether a request within its guarantee may go before what is not, in the engine's line.

        So much may that there is room beside it for the largest of those it passes, or that one would never start.
        """
        if not self._sequences_go_first(worker, channel, request):
            return False
        capacity = worker.shape.capacity_blocks
        guaranteed = channel.share.guaranteed_blocks(capacity)
        room = capacity - capacity // ADMISSION_PART - self._behind.most_blocks(worker.epoch)
        others = sum(other.share.guaranteed_blocks(capacity) for other in self._guaranteed)
        if others <= room:
            return True
        first = _bent(guaranteed, others, room)
        if worker.ledger.held_by(channel.name) + blocks > first:
            return False
        policy = self._policy
        return policy.expected_of(worker, channel.name) + policy.peak_blocks(request, worker, blocks) <= first

    def _sequences_go_first(self, worker: Worker, channel: Channel, request: Announced) -> bool:
        """Return whether its completions leave the engine one sequence for those that it passes.

        Only where more are granted than the engine runs at once do any wait in its line for a sequence.
        """
        most = worker.shape.max_num_seqs
        if worker.most_sequences <= most:
            return True
        guaranteed = max(channel.share.guaranteed_sequences(most), 1)
        others = sum(max(other.share.guaranteed_sequences(most), 1) for other in self._guaranteed)
        return worker.ledger.sequences_of(channel.name) + max(request.n, 1) <= _bent(guaranteed, others, most - 1)

    def _sequences_are_left(
        self, worker: Worker, channel: Channel, entry: Entry, saving: Saving | None, within: bool, now_ns: int
    ) -> bool:
        """Return whether the engine can run the entry as well; within its guarantee nobody else's are kept from it."""
        wanted = max(entry.announced.n, 1)
        if within and worker.ledger.sequences_of(channel.name) + wanted <= self._sequences(worker, channel, 1):
            return sequences_fit(worker, wanted)
        wanted += 0 if saving is None else max(saving.entry.announced.n, 1)
        if not self.guards(channel) or sequences_fit(worker, wanted + self._most_fenced_sequences(worker)):
            return sequences_fit(worker, wanted)
        return sequences_fit(worker, wanted + self._fenced_sequences(worker, channel, now_ns))

    # ---- guarantees ----

    def spare(self, worker: Worker, channel: Channel, now_ns: int) -> Spare:
        """Return what the channel could take of the worker that is kept for nobody else."""
        sequences = worker.most_sequences - worker.ledger.sequences
        if not self.guards(channel):
            return Spare(worker.usable_blocks, sequences, 0)
        return Spare(
            worker.usable_blocks - self.fence(worker, channel, now_ns),
            sequences - self._fenced_sequences(worker, channel, now_ns),
            self._fence_of_peak(worker, channel, now_ns),
        )

    def guards(self, channel: Channel) -> bool:
        """Return whether any other channel has a guarantee."""
        guaranteed = self._guaranteed
        return len(guaranteed) > 1 or (len(guaranteed) == 1 and guaranteed[0] is not channel)

    def fence(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the blocks kept from the channel for what the others do not hold of their guarantees."""
        return sum(self._kept(worker, other, now_ns) for other in self._guaranteed if other is not channel)

    def _fence_of_peak(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the blocks of the predicted peak kept from the channel for the guarantees of the others.

        Under a policy whose requests grow, what is lent is outgrown, and comes home when they end: until then the
        engine would hold back whom the guarantee is for. So beside one that is in use more is kept than it uses.
        """
        if not self._grows:
            return self.fence(worker, channel, now_ns)
        return sum(self._kept_of_peak(worker, other, now_ns) for other in self._guaranteed if other is not channel)

    def _kept_of_peak(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        expected = self._policy.expected_of(worker, channel.name)
        unused = self.guarantee(worker, channel) - expected
        if unused <= 0 or self._has_work(worker, channel):
            return max(unused, 0)
        used = max(self._lately_used(worker, channel, now_ns), worker.ledger.held_by(channel.name))
        return min(unused, max(used - expected, 0) + worker.shape.capacity_blocks // KEPT_PART) if used else 0

    def _kept(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return what is kept of a guarantee: all that is unused if there is work for it, else what was used lately."""
        held = worker.ledger.held_by(channel.name)
        unused = self.guarantee(worker, channel) - held
        if unused <= 0 or self._has_work(worker, channel):
            return max(unused, 0)
        return max(min(unused, self._lately_used(worker, channel, now_ns) - held), 0)

    def _lately_used(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        lately = self._lately_on(worker, channel)
        return 0 if lately is None else lately.peak_blocks(now_ns, channel.hold_time.mean_ns)

    def _most_fenced_sequences(self, worker: Worker) -> int:
        return sum(other.share.guaranteed_sequences(worker.most_sequences) for other in self._guaranteed)

    def _fenced_sequences(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the sequences kept from the channel for the guarantees of the others, as `fence` does for blocks."""
        kept = 0
        for other in self._guaranteed:
            if other is channel:
                continue
            used = worker.ledger.sequences_of(other.name)
            unused = self._sequences(worker, other) - used
            if unused > 0 and not self._has_work(worker, other):
                lately = self._lately_on(worker, other)
                peak = 0 if lately is None else lately.peak_sequences(now_ns, other.hold_time.mean_ns)
                unused = min(unused, peak - used)
            kept += max(unused, 0)
        return kept

    def _lately_on(self, worker: Worker, channel: Channel) -> Lately | None:
        return self._lately.get(worker.epoch, {}).get(channel.name)

    def _has_work(self, worker: Worker, channel: Channel) -> bool:
        """Return whether a head waits for the worker that its guarantee can hold; what is larger starts by a saving."""
        guaranteed = channel.share.guaranteed_blocks(worker.shape.capacity_blocks)
        group = worker.group
        return any(self._bookings.in_group(head, group)[0] <= guaranteed for head in channel.heads_for(group.models))

    def guarantee(self, worker: Worker, channel: Channel) -> int:
        """Return the channel's guarantee on the worker, bent if a saving head would not fit beside all of them."""
        capacity = worker.shape.capacity_blocks
        guaranteed = channel.share.guaranteed_blocks(capacity)
        saving = self._savings.on(worker)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        others = sum(
            other.share.guaranteed_blocks(capacity) for other in self._guaranteed if other is not saving.channel
        )
        return _bent(guaranteed, others, capacity - saving.peak_blocks)

    def _sequences(self, worker: Worker, channel: Channel, least: int = 0) -> int:
        """Return the sequences guaranteed to the channel on the worker, `least` or more, bent like its blocks."""
        most = worker.most_sequences
        guaranteed = max(channel.share.guaranteed_sequences(most), least)
        saving = self._savings.on(worker)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        others = sum(
            max(other.share.guaranteed_sequences(most), least)
            for other in self._guaranteed
            if other is not saving.channel
        )
        return _bent(guaranteed, others, most - max(saving.entry.announced.n, 1))


def _of_one(reservation: Reservation, blocks: int) -> int:
    """Return the blocks of one completion: an engine takes each in, and preempts it, alone."""
    return -(-blocks // max(reservation.sequences, 1))


def _bent(guaranteed: int, others: int, room: int) -> int:
    """Return a guarantee, in proportion less if `others`, all of them, are more than the room there is."""
    return guaranteed if others <= room else guaranteed * max(room, 0) // others


def below_ceiling(worker: Worker, channel: Channel, blocks: int) -> bool:
    """Return whether the channel may hold `blocks` more of the worker; its first request there always may."""
    if channel.share.ceiling_share >= 1:
        return True  # then only room limits it, and room that is merely taken is worth saving for
    held = worker.ledger.held_by(channel.name)
    return not held or held + blocks <= channel.share.ceiling_blocks(worker.shape.capacity_blocks)


def sequences_fit(worker: Worker, sequences: int) -> bool:
    """Return whether the engine can run that many completions more; an idle one takes any request."""
    return not worker.ledger.sequences or worker.ledger.sequences + sequences <= worker.most_sequences


def in_tiers(channels: Sequence[Channel]) -> list[list[Channel]]:
    """Return the channels by tier, the lowest first, each tier in the given order."""
    tiers = sorted({channel.share.tier for channel in channels})
    return [[channel for channel in channels if channel.share.tier == tier] for tier in tiers]
