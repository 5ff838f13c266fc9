"""The largest request of each worker that does not go first in its engine.

An engine takes a request in when all of its prompt fits, after a preemption all it has written. Those that go first
pass it in the engine's line, so what they may hold must leave room for the largest of those they pass.
"""

from __future__ import annotations


class _Sizes:
    """The requests of one worker with their blocks, how many have each number of blocks, and the highest number."""

    __slots__ = ("blocks", "counts", "most")

    def __init__(self) -> None:
        """Start with none."""
        self.blocks: dict[str, int] = {}
        self.counts: dict[int, int] = {}
        self.most = 0


class Largest:
    """Sizes by epoch and request. A change costs O(1), save where the one largest leaves."""

    def __init__(self) -> None:
        """Start with no worker."""
        self._by_epoch: dict[int, _Sizes] = {}

    def most_blocks(self, epoch: int) -> int:
        """Return the blocks of the largest request, 0 if there is none."""
        sizes = self._by_epoch.get(epoch)
        return 0 if sizes is None else sizes.most

    def began(self, epoch: int, request_id: str, blocks: int) -> None:
        """Count a request that is expected to hold `blocks` at its fullest."""
        sizes = self._by_epoch.get(epoch)
        if sizes is None:
            sizes = self._by_epoch[epoch] = _Sizes()
        sizes.blocks[request_id] = blocks
        sizes.counts[blocks] = sizes.counts.get(blocks, 0) + 1
        sizes.most = max(sizes.most, blocks)

    def holds(self, epoch: int, request_id: str, blocks: int) -> None:
        """Note what a request holds: it may be more than was expected. Requests that are not counted are ignored."""
        sizes = self._by_epoch.get(epoch)
        if sizes is not None and blocks > sizes.blocks.get(request_id, blocks):
            self.ended(epoch, request_id)
            self.began(epoch, request_id, blocks)

    def ended(self, epoch: int, request_id: str) -> None:
        """Count a request no more, if it was."""
        sizes = self._by_epoch.get(epoch)
        blocks = None if sizes is None else sizes.blocks.pop(request_id, None)
        if sizes is None or blocks is None:
            return
        left = sizes.counts[blocks] - 1
        if left:
            sizes.counts[blocks] = left
            return
        del sizes.counts[blocks]
        if blocks == sizes.most:
            sizes.most = max(sizes.counts, default=0)

    def forget(self, epoch: int) -> None:
        """Forget a worker that is gone."""
        self._by_epoch.pop(epoch, None)
