"""KV blocks of one engine and their prefix cache, as vLLM's block pool keeps them; counts and keys, no memory.

A block whose every token is computed has a key that stands for the whole
prefix up to its end. Sequences with the same prefix share such blocks. A block
that nobody holds is free but stays findable until it is taken for something
else: blocks without a key are taken first, then the ones freed longest ago
(of one sequence its last block first). This is the order of vLLM 0.32's
`BlockPool.free_blocks` and `FreeKVCacheBlockQueue`.

Blocks without a key are all alike, so they are only counted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

Key = int | tuple[int, int]
"""A prompt block's key is the caller's int; a block with generated tokens is its sequence's own: (serial, index)."""


class KeyedBlock:
    """A full block that can be found by its key, and how many sequences hold it."""

    __slots__ = ("holders", "key")

    def __init__(self, key: Key, holders: int) -> None:
        """Make a block under `key`."""
        self.key = key
        self.holders = holders


class BlockPool:
    """All blocks; `free` counts those nobody holds, with or without a key, `shared` holders beyond a block's first."""

    __slots__ = ("_by_key", "_idle", "free", "shared")

    def __init__(self, total: int) -> None:
        """Start with `total` free blocks without keys."""
        self.free = total
        self.shared = 0
        self._idle: OrderedDict[KeyedBlock, None] = OrderedDict()
        self._by_key: dict[Key, list[KeyedBlock]] = {}

    def take(self, count: int) -> None:
        """Take `count` free blocks to write in; keys of idle blocks are forgotten only when no others are left."""
        evicted = count - (self.free - len(self._idle))
        self.free -= count
        while evicted > 0:
            evicted -= 1
            block, _ = self._idle.popitem(last=False)
            self._forget(block)

    def find(self, keys: Iterable[Key]) -> list[KeyedBlock]:
        """Return the blocks of the longest prefix of `keys` that can all be found."""
        found: list[KeyedBlock] = []
        for key in keys:
            blocks = self._by_key.get(key)
            if blocks is None:
                break
            found.append(blocks[0])
        return found

    def claim(self, blocks: list[KeyedBlock]) -> None:
        """Hold blocks that were found; idle ones are no longer free."""
        for block in blocks:
            if block.holders == 0:
                del self._idle[block]
                self.free -= 1
            else:
                self.shared += 1
            block.holders += 1

    def publish(self, key: Key) -> KeyedBlock:
        """Give a block that was taken, and will be full after this step, its key; the taker holds it."""
        block = KeyedBlock(key, 1)
        self._by_key.setdefault(key, []).append(block)
        return block

    def release(self, shared: list[KeyedBlock], own: list[Key], unkeyed: int) -> None:
        """Give back one sequence's blocks: keyed ones, full ones never published, and unfinished ones, in its order."""
        self.free += len(own) + unkeyed
        for key in reversed(own):
            block = KeyedBlock(key, 0)
            self._by_key.setdefault(key, []).append(block)
            self._idle[block] = None
        for block in reversed(shared):
            block.holders -= 1
            if block.holders == 0:
                self._idle[block] = None
                self.free += 1
            else:
                self.shared -= 1

    def _forget(self, block: KeyedBlock) -> None:
        blocks = self._by_key[block.key]
        if len(blocks) == 1:
            del self._by_key[block.key]
        else:
            blocks.remove(block)


def prompt_keys(prompt_ids: Iterable[int], block_size: int) -> list[int]:
    """Return the chained keys of a prompt's full blocks: equal keys mean equal tokens from the first on.

    Keys are Python's 64-bit hashes, good within one process: among a million blocks two that differ have the same
    key with probability 3e-8.
    """
    ids = array("q", prompt_ids).tobytes()
    block_bytes = 8 * block_size
    keys: list[int] = []
    key = 0
    for start in range(0, len(ids) - block_bytes + 1, block_bytes):
        key = hash((key, ids[start : start + block_bytes]))
        keys.append(key)
    return keys
