"""What a guarantee keeps of a worker for its channel, and from the others.

A guarantee is a part of a worker's blocks and the same part of its sequences. It counts what requests are expected
to grow to: under a policy that books little at first, so many could be let in for what they book that they would
outgrow it together.

All that is unused is kept while there is work for it; else what was used lately, and the rest is lent. Where a head
that saves would not fit beside all of them, they bend, in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.scheduler.core.admission.bookings import Bookings
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Worker
from services.scheduler.core.messages import Announced, WorkerOpened
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.lately import Lately
from services.scheduler.core.sharing.savings import Saving, Savings

KEPT_PART: Final = 16
"""Part of a worker's blocks kept of the predicted peak beside a guarantee in use, on top of what it used lately.

A hundred long outputs at once are off by a few hundredths of the cache from what is expected of them. With nothing kept
engines that run what is guaranteed first preempt for it 98 times in 1,000 requests, with a sixteenth 20 times, with an
eighth 13 times, and others have 0.98 of their tokens/s instead of 0.995 (`benchmarks.admission.isolation`)."""


class Guarantees:
    """The channels that have guarantees, and what each used lately of each worker, which it owns."""

    def __init__(self, savings: Savings, policy: Policy, bookings: Bookings) -> None:
        """Start with no channel."""
        self._savings = savings
        self._policy = policy
        self._bookings = bookings
        self._grows = policy.reserve_output_tokens > 0
        self._channels: list[Channel] = []
        self._lately: dict[int, dict[str, Lately]] = {}

    def add(self, channel: Channel) -> None:
        """Take one more channel into account."""
        if channel.share.guaranteed_share:
            self._channels.append(channel)

    def reshared(self, channels: Sequence[Channel]) -> None:
        """Take the shares that `channels`, all there are, have now."""
        self._channels = [channel for channel in channels if channel.share.guaranteed_share]

    # ---- what was used lately ----

    def note_use(self, worker: Worker, channel: Channel, now_ns: int) -> None:
        """Note that the channel holds more of the worker than before."""
        if channel.share.guaranteed_share:
            by_channel = self._lately.setdefault(worker.epoch, {})
            lately = by_channel.get(channel.name)
            if lately is None:
                lately = by_channel[channel.name] = Lately(now_ns)
            ledger, name = worker.ledger, channel.name
            lately.note(ledger.held_by(name), ledger.sequences_of(name), now_ns, self._hold_ns(worker, channel))

    def hand_over(self, before: Worker, opened: WorkerOpened) -> None:
        """Remember in another epoch of the same worker what was used lately of it; one that has started anew is new."""
        lately = self._lately.get(before.epoch)
        if lately is not None and before.instance_id == opened.instance_id:
            self._lately[opened.epoch] = lately

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._lately.pop(worker.epoch, None)

    # ---- how large they are ----

    def blocks(self, worker: Worker, channel: Channel) -> int:
        """Return the channel's guarantee on the worker, bent if a saving head would not fit beside all of them."""
        capacity = worker.shape.capacity_blocks
        guaranteed = channel.share.guaranteed_blocks(capacity)
        saving = self._savings.on(worker)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        return bent(guaranteed, self.total_blocks(capacity, saving.channel), capacity - saving.peak_blocks)

    def sequences(self, worker: Worker, channel: Channel) -> int:
        """Return the sequences guaranteed to the channel on the worker, bent like its blocks."""
        most = worker.most_sequences
        guaranteed = channel.share.guaranteed_sequences(most)
        saving = self._savings.on(worker)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        others = self.total_sequences(most, saving.channel)
        return bent(guaranteed, others, most - max(saving.entry.announced.n, 1))

    def total_blocks(self, capacity_blocks: int, but: Channel | None = None) -> int:
        """Return the sum of all guarantees but one, as they are unbent, on a worker of that capacity."""
        return sum(other.share.guaranteed_blocks(capacity_blocks) for other in self._channels if other is not but)

    def total_sequences(self, most: int, but: Channel | None = None) -> int:
        """Return the sum of what is guaranteed of `most` sequences to each channel but one."""
        return sum(other.share.guaranteed_sequences(most) for other in self._channels if other is not but)

    def may_hold(self, worker: Worker, channel: Channel, blocks: int, completions: int) -> bool:
        """Return whether the channel's guarantee, unused and not bent, has room for so much."""
        share = channel.share
        if blocks > share.guaranteed_blocks(worker.shape.capacity_blocks):
            return False
        return completions <= share.guaranteed_sequences(worker.most_sequences)

    def is_within(self, worker: Worker, channel: Channel, request: Announced, blocks: int) -> bool:
        """Return whether the channel stays within its guarantee with the request, now and at its fullest."""
        if not channel.share.guaranteed_share:
            return False
        guaranteed = self.blocks(worker, channel)
        if worker.ledger.held_by(channel.name) + blocks > guaranteed:
            return False
        policy = self._policy
        peak_blocks = policy.peak_blocks(request, worker, blocks)
        return policy.expected_of(worker, channel.name) + peak_blocks <= guaranteed

    def leave_room(self, worker: Worker, saving: Saving) -> bool:
        """Return whether a saving head has room beside all guarantees in use, its own channel's too, below its ceiling.

        Those of the others are bent to the room beside the head alone.
        """
        own, capacity = saving.channel, worker.shape.capacity_blocks
        if saving.peak_blocks + self.blocks(worker, own) > own.share.ceiling_blocks(capacity):
            return False
        blocks = sum(self.blocks(worker, channel) for channel in self._channels)
        sequences = sum(self.sequences(worker, channel) for channel in self._channels)
        wanted = max(saving.entry.announced.n, 1)
        return saving.peak_blocks + blocks <= capacity and wanted + sequences <= worker.most_sequences

    # ---- what they keep from others ----

    def keep_from(self, channel: Channel) -> bool:
        """Return whether any other channel has a guarantee."""
        channels = self._channels
        return len(channels) > 1 or (len(channels) == 1 and channels[0] is not channel)

    def others_run(self, worker: Worker, channel: Channel) -> bool:
        """Return whether another channel with a guarantee holds anything of the worker."""
        held_by = worker.ledger.held_by
        return any(other is not channel and held_by(other.name) for other in self._channels)

    def fence(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the blocks kept from the channel for what the others do not hold of their guarantees."""
        return sum(self._kept_blocks(worker, other, now_ns) for other in self._channels if other is not channel)

    def fenced_sequences(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the sequences kept from the channel for the guarantees of the others, as `fence` does for blocks."""
        return sum(self._kept_sequences(worker, other, now_ns) for other in self._channels if other is not channel)

    def fence_of_peak(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the blocks of the predicted peak kept from the channel for the guarantees of the others.

        Under a policy whose requests grow, what is lent is outgrown, and comes home when they end: until then the
        engine would hold back whom the guarantee is for. So beside one that is in use more is kept than it uses.
        """
        if not self._grows:
            return self.fence(worker, channel, now_ns)
        return sum(self._kept_of_peak(worker, other, now_ns) for other in self._channels if other is not channel)

    def _kept_blocks(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        held = worker.ledger.held_by(channel.name)
        unused = self.blocks(worker, channel) - held
        if unused > 0 and not self._has_work(worker, channel):
            unused = min(unused, self._lately_blocks(worker, channel, now_ns) - held)
        return max(unused, 0)

    def _kept_sequences(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        used = worker.ledger.sequences_of(channel.name)
        unused = self.sequences(worker, channel) - used
        if unused > 0 and not self._has_work(worker, channel):
            lately = self._lately_on(worker, channel)
            peak = 0 if lately is None else lately.peak_sequences(now_ns, self._hold_ns(worker, channel))
            unused = min(unused, peak - used)
        return max(unused, 0)

    def _kept_of_peak(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        expected = self._policy.expected_of(worker, channel.name)
        unused = self.blocks(worker, channel) - expected
        if unused > 0 and not self._has_work(worker, channel):
            used = max(self._lately_blocks(worker, channel, now_ns), worker.ledger.held_by(channel.name))
            beside = worker.shape.capacity_blocks // KEPT_PART
            unused = min(unused, max(used - expected, 0) + beside) if used else 0
        return max(unused, 0)

    def _lately_blocks(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        lately = self._lately_on(worker, channel)
        return 0 if lately is None else lately.peak_blocks(now_ns, self._hold_ns(worker, channel))

    @staticmethod
    def _hold_ns(worker: Worker, channel: Channel) -> int:
        return channel.account(worker.group.pool).hold_time.mean_ns

    def _lately_on(self, worker: Worker, channel: Channel) -> Lately | None:
        return self._lately.get(worker.epoch, {}).get(channel.name)

    def _has_work(self, worker: Worker, channel: Channel) -> bool:
        """Return whether a head waits for the worker that its guarantee can hold; what is larger starts by a saving."""
        group, booked = worker.group, self._bookings.in_group
        return any(
            self.may_hold(worker, channel, booked(head, group)[0], head.announced.n)
            for head in channel.heads_for(group.models)
        )


def bent(guaranteed: int, others: int, room: int) -> int:
    """Return a guarantee, in proportion less if `others`, all of them, are more than the room there is."""
    return guaranteed if others <= room else guaranteed * max(room, 0) // others
