"""Which requests go first in the engine's own line (docs/adr/0016-guaranteed-first.md).

An engine that runs what is guaranteed before what is not preempts that for it. So that none of those it passes waits
for ever, what goes first leaves room for the largest of them, in blocks and in sequences: guarantees bend for it.
"""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Worker
from services.scheduler.core.ledger import Reservation
from services.scheduler.core.messages import Announced
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.guarantees import Guarantees, bent
from services.scheduler.core.sharing.largest import Largest
from services.scheduler.core.standing import PREFIX

ADMISSION_PART: Final = 32
"""Part of a worker's blocks that is counted as kept free when its engine takes a request in: vLLM's watermark is 0.02
unless its user says otherwise."""


class Precedence:
    """Who goes first. Owns the sizes of those that do not."""

    def __init__(self, policy: Policy, guarantees: Guarantees) -> None:
        """Start with no worker."""
        self._policy = policy
        self._guarantees = guarantees
        self._behind = Largest()

    def opened(self, worker: Worker) -> None:
        """Note what a worker brings along that does not go first there."""
        for request_id in worker.ledger:
            reservation = worker.ledger.reservation(request_id)
            if reservation is not None and not reservation.guaranteed and not request_id.startswith(PREFIX):
                self._behind.began(worker.epoch, request_id, _of_one(reservation, reservation.held_blocks))

    def granted(self, worker: Worker, request_id: str, peak_blocks: int) -> None:
        """Note a request, booked, that is expected to hold so many blocks at its fullest."""
        reservation = worker.ledger.reservation(request_id)
        if reservation is not None and not reservation.guaranteed:
            self._behind.began(worker.epoch, request_id, _of_one(reservation, peak_blocks))

    def holds(self, worker: Worker, request_id: str, held_blocks: int) -> None:
        """Note what a request holds."""
        reservation = worker.ledger.reservation(request_id)
        if reservation is not None:
            self._behind.holds(worker.epoch, request_id, _of_one(reservation, held_blocks))

    def ended(self, worker: Worker, request_id: str) -> None:
        """Note that a request holds nothing any more."""
        self._behind.ended(worker.epoch, request_id)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._behind.forget(worker.epoch)

    def goes_first(self, worker: Worker, channel: Channel, request: Announced, blocks: int) -> bool:
        """Return whether a request within its guarantee may go before what is not, in the engine's line.

        So much may that there is room beside it for the largest of those it passes, or that one would never start.
        """
        if not self._leaves_a_sequence(worker, channel, request):
            return False
        capacity = worker.shape.capacity_blocks
        room = capacity - capacity // ADMISSION_PART - self._behind.most_blocks(worker.epoch)
        others = self._guarantees.total_blocks(capacity)
        if others <= room:
            return True
        first = bent(channel.share.guaranteed_blocks(capacity), others, room)
        if worker.ledger.held_by(channel.name) + blocks > first:
            return False
        policy = self._policy
        return policy.expected_of(worker, channel.name) + policy.peak_blocks(request, worker, blocks) <= first

    def _leaves_a_sequence(self, worker: Worker, channel: Channel, request: Announced) -> bool:
        """Return whether its completions leave the engine one sequence for those that it passes.

        Only where more are granted than the engine runs at once do any wait in its line for a sequence.
        """
        most = worker.shape.max_num_seqs
        if worker.most_sequences <= most:
            return True
        guaranteed = channel.share.guaranteed_sequences(most)
        first = bent(guaranteed, self._guarantees.total_sequences(most), most - 1)
        return worker.ledger.sequences_of(channel.name) + max(request.n, 1) <= first


def _of_one(reservation: Reservation, blocks: int) -> int:
    """Return the blocks of one completion: an engine takes each in, and preempts it, alone."""
    return -(-blocks // max(reservation.sequences, 1))
