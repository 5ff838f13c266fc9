"""The arbitration channels there are, and the shares they have at present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from services.scheduler.core.sharing.arbiter import Arbiter
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.line import Line
from services.scheduler.core.sharing.share import Share

SHARED_LINE = ""
"""Name of the one arbitration channel of a policy that keeps no channels apart."""

QUANTUM_BLOCK_NS: Final = 1_000_000
"""What a round gives the channel of least weight: a block for a millisecond. Rounds are given as many at once as it
takes, so a small quantum costs nothing and lets turns follow the weights closely."""

MOST_QUANTUM_BLOCK_NS: Final = 1_000_000_000
"""What it gives the channel of most weight at most: whose turn it is within a round nobody can tell, so that has to be
less than what requests cost. Of weights that are more than a thousand apart the least has accordingly less: a thousand
units where they are a million apart, which is as far as configuration lets them be."""


def block_ns_per_weight(shares: Iterable[Share]) -> float:
    """Return what one round gives for each unit of weight where these are the shares, and channels of none come."""
    weights = [share.weight for share in (*shares, Share())]
    return min(QUANTUM_BLOCK_NS / min(weights), MOST_QUANTUM_BLOCK_NS / max(weights))


class Roster:
    """Finds the channel that requests wait in, and makes it if need be. Owns what configuration says of shares.

    A channel that the configuration does not name (any more) has an ordinary share, not silence: what waits in it is
    served, and what it holds comes home by completions.
    """

    def __init__(self, shares: Mapping[str, Share], apart: bool, arbiter: Arbiter) -> None:
        """Make the channels that `shares` name; unless they are kept `apart`, one for all."""
        self.shares = dict(shares)
        self.channels: dict[str, Channel] = {}
        self._apart = apart
        self._arbiter = arbiter
        for name in shares if apart else (SHARED_LINE,):
            self._make(name)

    def channel(self, name: str) -> Channel:
        """Return the channel that requests of channel `name` wait in."""
        if not self._apart:
            name = SHARED_LINE
        found = self.channels.get(name)
        return self._make(name) if found is None else found

    def lines_of(self, name: str) -> list[Line]:
        """Return the lines that requests of channel `name` wait in."""
        channel = self.channels.get(name if self._apart else SHARED_LINE)
        return [] if channel is None else list(channel.lines.values())

    def reconfigure(self, shares: Mapping[str, Share]) -> None:
        """Give every channel its share of `shares`; what they hold, wait for and owe stays as it is."""
        if shares == self.shares:
            return
        self.shares = dict(shares)
        if not self._apart:
            return
        for channel in self.channels.values():
            channel.share = self._share(channel.name)
            channel.quantum_block_ns = self._quantum_block_ns(channel.share)
        self._arbiter.reshared()

    def _make(self, name: str) -> Channel:
        share = self._share(name)
        channel = self.channels[name] = Channel(name, share, self._quantum_block_ns(share))
        self._arbiter.add(channel)
        return channel

    def _share(self, name: str) -> Share:
        return self.shares.get(name, Share()) if self._apart else Share()

    def _quantum_block_ns(self, share: Share) -> int:
        return max(round(share.weight * block_ns_per_weight(self.shares.values())), 1)
