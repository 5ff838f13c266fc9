"""What a connection has read and not parsed, in pieces that end wherever a request may: none reaches into the next."""

from __future__ import annotations

EMPTY_LINE = b"\r\n\r\n"
"""The end of every head, and of every body without a length: after the last chunk, or its trailers."""


class Unparsed:
    """Bytes in their order. Cutting them anywhere changes nothing for the parser; where they are cut it can wait."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._data = b""
        self._at = 0
        self.held_bytes = 0

    def add(self, data: bytes) -> None:
        """Hold `data` behind what is held."""
        self._data = self._data[self._at :] + data if self.held_bytes else data
        self._at = 0
        self.held_bytes = len(self._data)

    def take(self, left_bytes: int | None) -> bytes | memoryview:
        """Return the next piece, and hold it no more; an empty one if more has to come first.

        It ends with the body of which `left_bytes` are to come, or else with an empty line, as far as that is here. The
        beginning of what may be an empty line waits for the rest of it.
        """
        data, start = self._data, self._at
        if left_bytes is not None:
            end = min(start + left_bytes, len(data))
        elif (found := data.find(EMPTY_LINE, start)) >= 0:
            end = found + len(EMPTY_LINE)
        else:
            end = len(data) - _begun_bytes(data, start)
        self._at = end
        self.held_bytes = len(data) - end
        return memoryview(data)[start:end] if start or self.held_bytes else data


def _begun_bytes(data: bytes, start: int) -> int:
    """Return how many bytes at the end of what is behind `start` may be the beginning of an empty line."""
    for count in (3, 2, 1):
        if data.endswith(EMPTY_LINE[:count], start):
            return count
    return 0
