"""What a channel may take of one worker, whatever is free there: ceiling, guarantees, sequences, savings."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from services.scheduler.core.backlog import Entry
from services.scheduler.core.channel import Channel
from services.scheduler.core.fleet import Worker
from services.scheduler.core.lately import Lately
from services.scheduler.core.savings import Savings


class Claim(enum.Enum):
    """How a channel may have blocks of a worker."""

    SHUT = "shut"  # nothing of this channel gets in until something ends there
    REFUSED = "refused"  # not so many blocks until something ends there
    GUARANTEED = "guaranteed"  # within its guarantee, whatever others want
    SHARED = "shared"  # from what neither a fence nor a saving keeps


class Rules:
    """Ceilings, guarantees and savings. Reads the channels, owns nothing."""

    def __init__(self, savings: Savings) -> None:
        """Apply the rules to channels that are added."""
        self._savings = savings
        self._guaranteed: list[Channel] = []
        self._lately: dict[int, dict[str, Lately]] = {}

    def add(self, channel: Channel) -> None:
        """Take one more channel into account."""
        if channel.share.guaranteed_share:
            self._guaranteed.append(channel)

    def reshared(self, channels: Sequence[Channel]) -> None:
        """Take the shares that `channels`, all there are, have now."""
        self._guaranteed = [channel for channel in channels if channel.share.guaranteed_share]

    def claim(self, worker: Worker, channel: Channel, entry: Entry, blocks: int, now_ns: int) -> Claim:
        """Return how the entry may have `blocks` of the worker, if they are free."""
        if not below_ceiling(worker, channel, blocks):
            return Claim.REFUSED
        saving = self._savings.on(worker)
        bound = saving is not None and saving.binds(channel, entry)
        kept_sequences = max(saving.entry.announced.n, 1) if saving is not None and bound else 0
        if not sequences_fit(worker, max(entry.announced.n, 1) + kept_sequences):
            return Claim.REFUSED if sequences_fit(worker, 1) else Claim.SHUT
        within = channel.share.guaranteed_share > 0 and (
            worker.ledger.held_by(channel.name) + blocks <= self.guarantee(worker, channel)
        )
        if saving is not None and bound and (not within or saving.channel is channel):
            kept_blocks = self.fence(worker, saving.channel, now_ns)
            if not self._savings.lets_pass(saving, channel, blocks, kept_blocks, now_ns):
                shut = self._savings.is_due(saving, now_ns) and not channel.share.guaranteed_share
                return Claim.SHUT if shut else Claim.REFUSED
        return Claim.GUARANTEED if within else Claim.SHARED

    def granted(self, worker: Worker, channel: Channel, now_ns: int) -> None:
        """Note that the channel holds more of the worker than before."""
        if channel.share.guaranteed_share:
            by_channel = self._lately.setdefault(worker.epoch, {})
            lately = by_channel.get(channel.name)
            if lately is None:
                lately = by_channel[channel.name] = Lately(now_ns)
            lately.note(worker.ledger.held_by(channel.name), now_ns, channel.hold_time.mean_ns)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._lately.pop(worker.epoch, None)

    def fence(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return the blocks kept from the channel for the guarantees of the others."""
        return sum(self._kept(worker, other, now_ns) for other in self._guaranteed if other is not channel)

    def _kept(self, worker: Worker, channel: Channel, now_ns: int) -> int:
        """Return what is kept of a guarantee: all that is unused if there is work for the worker, else what it used
        lately."""
        unused = self.guarantee(worker, channel) - worker.ledger.held_by(channel.name)
        if unused <= 0 or channel.has_work_for(worker.group.models):
            return max(unused, 0)
        lately = self._lately.get(worker.epoch, {}).get(channel.name)
        if lately is None:
            return 0
        used = lately.peak_blocks(now_ns, channel.hold_time.mean_ns) - worker.ledger.held_by(channel.name)
        return max(min(unused, used), 0)

    def guarantee(self, worker: Worker, channel: Channel) -> int:
        """Return the channel's guarantee on the worker, bent if a saving head would not fit beside all of them."""
        capacity = worker.shape.capacity_blocks
        guaranteed = channel.share.guaranteed_blocks(capacity)
        saving = self._savings.on(worker)
        if not guaranteed or saving is None or saving.channel is channel:
            return guaranteed
        room = capacity - saving.blocks
        others = sum(
            other.share.guaranteed_blocks(capacity) for other in self._guaranteed if other is not saving.channel
        )
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


def in_tiers(channels: Sequence[Channel]) -> list[list[Channel]]:
    """Return the channels by tier, the lowest first, each tier in the given order."""
    tiers = sorted({channel.share.tier for channel in channels})
    return [[channel for channel in channels if channel.share.tier == tier] for tier in tiers]
