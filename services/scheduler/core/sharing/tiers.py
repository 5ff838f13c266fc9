"""Tiers of channels: those of a lower one go strictly first, so what they hold of a worker is gone for higher ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.channel import Channel

MARGIN_PART: Final = 16
"""Part of a worker's blocks that is counted as taken beside what lower tiers hold, under a policy whose requests grow:
the forecast by which it admits is above that, and keeps a margin of some hundredths."""


class Tiers:
    """The channels by tier, the lowest first, each tier in the order in which its channels came."""

    def __init__(self, policy: Policy) -> None:
        """Start with no channel; `policy` says whether requests grow."""
        self._grows = policy.reserve_output_tokens > 0
        self.rings: list[list[Channel]] = []

    def sort(self, channels: Sequence[Channel]) -> None:
        """Take the tiers that `channels`, all there are, have now."""
        tiers = sorted({channel.share.tier for channel in channels})
        self.rings = [[channel for channel in channels if channel.share.tier == tier] for tier in tiers]

    def from_tier(self, tier: int | None) -> list[Channel]:
        """Return the channels of a tier and of those that go after it, None for all."""
        rings = [ring for ring in self.rings if tier is None or ring[0].share.tier >= tier]
        return [channel for ring in rings for channel in ring]

    def has_lower(self, channel: Channel) -> bool:
        """Return whether any channel goes strictly before this one."""
        return self.rings[0][0].share.tier < channel.share.tier

    def leave_room(self, worker: Worker, channel: Channel, peak_blocks: int, completions: int) -> bool:
        """Return whether a request of `channel` has room beside what lower tiers hold of the worker.

        Whatever others give back, it cannot start where it has none. What they hold counts, not what each of their
        requests is expected to hold at its fullest: those moments are not the same.
        """
        ledger = worker.ledger
        held_blocks = sequences = 0
        for ring in self.rings:
            if ring[0].share.tier >= channel.share.tier:
                break
            for lower in ring:
                if used := ledger.sequences_of(lower.name):
                    sequences += used
                    held_blocks += ledger.held_by(lower.name)
        capacity = worker.shape.capacity_blocks
        if not sequences:
            return peak_blocks <= capacity
        margin_blocks = capacity // MARGIN_PART if self._grows else 0
        fits = held_blocks + peak_blocks + margin_blocks <= capacity
        return fits and sequences + max(completions, 1) <= worker.most_sequences
