"""Numbers in order, of which each is taken out when it leaves, wherever it stands.

A heap can only forget what has left once it comes up, or all of it at once: where half a million requests were
cancelled one step would pay for all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, Generic, TypeVar

CHUNK: Final = 512
"""Values moved at most to let one in or out: as quickly as those of a chunk are compared to find it."""

T = TypeVar("T", int, tuple[int, int])


class Ordered(Generic[T]):
    """Values, each once, in chunks that are in order and never empty."""

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        """Start empty."""
        self._chunks: list[list[T]] = []

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self._chunks)

    def first(self) -> T:
        """Return the least; there is one."""
        return self._chunks[0][0]

    def add(self, value: T) -> None:
        """Let in a value that is not here; what is above all others, as most are, costs the least."""
        chunks = self._chunks
        if not chunks or chunks[-1][-1] < value:
            if not chunks or len(chunks[-1]) == CHUNK:
                chunks.append([])
            chunks[-1].append(value)
            return
        at = self._chunk_of(value)
        chunk = chunks[at]
        insort(chunk, value)
        if len(chunk) > CHUNK:
            chunks.insert(at + 1, chunk[CHUNK // 2 :])
            del chunk[CHUNK // 2 :]

    def discard(self, value: T) -> None:
        """Take a value out, if it is here."""
        chunks = self._chunks
        at = self._chunk_of(value)
        if at == len(chunks):
            return
        chunk = chunks[at]
        place = bisect_left(chunk, value)
        if place < len(chunk) and chunk[place] == value:
            del chunk[place]
            if not chunk:
                del chunks[at]

    def _chunk_of(self, value: T) -> int:
        """Return where the chunk is in which `value` is, or belongs; of none the first."""
        chunks = self._chunks
        at = bisect_left(chunks, [value])  # the first one that begins with it, or with more
        return at - 1 if at and not (at < len(chunks) and chunks[at][0] == value) else at
