"""What a channel may take of one worker, whatever is free there: ceiling, guarantees, sequences, savings."""

from __future__ import annotations

import enum
from typing import NamedTuple

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.guarantees import Guarantees
from services.scheduler.core.sharing.savings import Saving, Savings


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
    """Ceilings, guarantees and savings, put together. Owns nothing."""

    def __init__(self, savings: Savings, policy: Policy, guarantees: Guarantees) -> None:
        """Apply what these say."""
        self._savings = savings
        self._policy = policy
        self._guarantees = guarantees

    def claim(self, worker: Worker, channel: Channel, entry: Entry, blocks: int, now_ns: int) -> Claim:
        """Return how the entry may have `blocks` of the worker, if they are free."""
        if not below_ceiling(worker, channel, blocks):
            return Claim.REFUSED
        guarantees = self._guarantees
        saving = self._savings.on(worker)
        if saving is not None and not saving.binds(channel, entry):
            saving = None
        within = guarantees.is_within(worker, channel, entry.announced, blocks)
        if not self._sequences_are_left(worker, channel, entry, 0, within, now_ns):
            return Claim.REFUSED if sequences_fit(worker, 1) else Claim.SHUT
        if saving is not None and not self._passes(worker, channel, entry, blocks, saving, within, now_ns):
            shut = self._savings.is_due(saving, now_ns) and not channel.share.guaranteed_share
            return Claim.SHUT if shut else Claim.REFUSED
        return Claim.GUARANTEED if within else Claim.SHARED

    def is_last_taken(self, worker: Worker, channel: Channel, entry: Entry) -> bool:
        """Return whether the entry, and another that the worker has, are on their last attempt.

        An engine that dies takes all that it runs along, whichever of them it dies of.
        """
        return entry.announced.last_attempt and self.has_last(worker, channel, entry)

    def has_last(self, worker: Worker, channel: Channel, entry: Entry | None = None) -> bool:
        """Return whether one on its last attempt runs on the worker, or another than the entry saves there."""
        if worker.ledger.last_attempts:
            return True
        saving = self._savings.on(worker)
        return saving is not None and saving.entry.announced.last_attempt and saving.binds(channel, entry)

    def _passes(
        self, worker: Worker, channel: Channel, entry: Entry, blocks: int, saving: Saving, within: bool, now_ns: int
    ) -> bool:
        """Return whether the entry may go before the head that saves on the worker.

        It may within its channel's guarantee, in blocks and in sequences or where its head's are left besides; or if it
        does not delay the head.
        """
        guarantees, head = self._guarantees, saving.entry.announced
        if saving.start_ns is None:
            kept_blocks = guarantees.fence(worker, saving.channel, now_ns)
            kept_sequences = guarantees.fenced_sequences(worker, saving.channel, now_ns)
            self._savings.book_start(saving, kept_blocks, kept_sequences, now_ns)
        if (
            within
            and (saving.channel is not channel or guarantees.leave_room(worker, saving))
            and self._sequences_are_left(worker, channel, entry, head.completions, within, now_ns)
        ):
            return True
        return self._savings.lets_pass(saving, channel, blocks, entry.announced.completions, now_ns)

    def room(
        self, worker: Worker, channel: Channel, entry: Entry, blocks: int, claim: Claim, now_ns: int
    ) -> tuple[int, int]:
        """Return how large a booking the claim has room for, and the blocks that a fence keeps from it."""
        policy, request, guarantees = self._policy, entry.announced, self._guarantees
        if claim is Claim.GUARANTEED:
            # Whatever is expected of the worker; but of two the one of which less is expected is the roomier.
            room = worker.usable_blocks
            return (room if room < blocks else max(policy.room_blocks(request, worker, blocks), blocks)), 0
        if claim is not Claim.SHARED:
            return 0, 0
        if not guarantees.keep_from(channel):
            room = worker.usable_blocks
            return (room if room < blocks else policy.room_blocks(request, worker, blocks)), 0
        fence = guarantees.fence(worker, channel, now_ns)
        room = worker.usable_blocks - fence
        if room >= blocks:
            due = self._is_due(worker, channel, entry, now_ns)
            kept = guarantees.fence_of_peak(worker, channel, now_ns)
            room = policy.room_blocks(request, worker, blocks, due) - kept
        return room, fence

    def spare(self, worker: Worker, channel: Channel, now_ns: int) -> Spare:
        """Return what the channel could take of the worker that is kept for nobody else."""
        guarantees = self._guarantees
        sequences = worker.most_sequences - worker.ledger.sequences
        if not guarantees.keep_from(channel):
            return Spare(worker.usable_blocks, sequences, 0)
        return Spare(
            worker.usable_blocks - guarantees.fence(worker, channel, now_ns),
            sequences - guarantees.fenced_sequences(worker, channel, now_ns),
            guarantees.fence_of_peak(worker, channel, now_ns),
        )

    def _is_due(self, worker: Worker, channel: Channel, entry: Entry, now_ns: int) -> bool:
        """Return whether the entry's start on the worker was booked for now, beside guarantees of others in use."""
        saving = self._savings.of(entry)
        if saving is None or saving.worker is not worker or not self._savings.is_due(saving, now_ns):
            return False
        return self._guarantees.others_run(worker, channel)

    def _sequences_are_left(
        self, worker: Worker, channel: Channel, entry: Entry, of_head: int, within: bool, now_ns: int
    ) -> bool:
        """Return whether the engine can run the entry as well, beside those `of_head`, a head that saves there.

        Within its guarantee nobody else's are kept from it.
        """
        guarantees = self._guarantees
        wanted = entry.announced.completions
        if within and worker.ledger.sequences_of(channel.name) + wanted <= guarantees.sequences(worker, channel):
            return sequences_fit(worker, wanted)
        wanted += of_head
        if not guarantees.keep_from(channel):
            return sequences_fit(worker, wanted)
        if sequences_fit(worker, wanted + guarantees.total_sequences(worker.most_sequences)):
            return True
        return sequences_fit(worker, wanted + guarantees.fenced_sequences(worker, channel, now_ns))


def below_ceiling(worker: Worker, channel: Channel, blocks: int) -> bool:
    """Return whether the channel may hold `blocks` more of the worker; its first request there always may."""
    if not channel.share.has_ceiling:
        return True  # then only room limits it, and room that is merely taken is worth saving for
    held = worker.ledger.held_by(channel.name)
    return not held or held + blocks <= channel.share.ceiling_blocks(worker.shape.capacity_blocks)


def sequences_fit(worker: Worker, sequences: int) -> bool:
    """Return whether the engine can run that many completions more; an idle one takes any request."""
    return not worker.ledger.sequences or worker.ledger.sequences + sequences <= worker.most_sequences
