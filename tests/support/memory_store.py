"""A store that keeps everything in memory, for tests and simulations."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path

from services.queue.core.effects import Write
from services.queue.core.records import FAMILIES
from services.queue.storage.store import Row, StoreError


class MemoryStore:
    """Families as dictionaries with sorted keys; durable for as long as the object lives."""

    def __init__(self, disk_free_bytes: int = 1 << 40) -> None:
        """Make an empty store that reports `disk_free_bytes`."""
        self.free_bytes = disk_free_bytes
        self._rows: dict[str, dict[bytes, bytes]] = {family: {} for family in FAMILIES}
        self._keys: dict[str, list[bytes]] = {family: [] for family in FAMILIES}
        self._guard = threading.Lock()

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the row of `key`, or None."""
        with self._guard:
            return self._rows[family].get(key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of `keys`, in order, None where there is none."""
        with self._guard:
            return [self._rows[family].get(key) for key in keys]

    def may_hold(self, family: str, key: bytes) -> bool:
        """Return whether there is a row of `key`."""
        with self._guard:
            return key in self._rows[family]

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, by key."""
        with self._guard:
            keys = self._keys[family]
            first = bisect_left(keys, start)
            last = bisect_left(keys, end) if end else len(keys)
            return [(key, self._rows[family][key]) for key in keys[first : min(last, first + limit)]]

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, from the last downwards."""
        with self._guard:
            keys = self._keys[family]
            first = bisect_left(keys, start)
            last = bisect_left(keys, end) if end else len(keys)
            wanted = keys[max(first, last - limit) : last]
            return [(key, self._rows[family][key]) for key in reversed(wanted)]

    def write(self, writes: Sequence[Write]) -> None:
        """Apply all writes."""
        with self._guard:
            for write in writes:
                family, key, value = write.family, write.key, write.value
                rows, keys = self._rows[family], self._keys[family]
                if value is not None:
                    if key not in rows:
                        insort(keys, key)
                    rows[key] = value
                elif rows.pop(key, None) is not None:
                    del keys[bisect_left(keys, key)]

    def write_at_once(self, writes: Sequence[Write]) -> bool:
        """Apply all writes: nothing has to be waited for."""
        self.write(writes)
        return True

    def doubt(self) -> str:
        """Return that there is none."""
        return ""

    def write_failure(self) -> str:
        """Return that there is none."""
        return ""

    def wait_durable(self) -> None:
        """Nothing to wait for."""

    def checkpoint(self, path: Path) -> None:
        """Raise StoreError: there is nothing on disk."""
        raise StoreError(f"a store in memory cannot be copied to {path}")

    def disk_free_bytes(self) -> int:
        """Return what the constructor was told."""
        return self.free_bytes

    def make_room(self) -> bool:
        """Return whether anything is free."""
        return self.free_bytes > 0

    def is_reserve_given_up(self) -> bool:
        """Return that there is none."""
        return False

    def keep_reserve(self) -> None:
        """Nothing to do."""

    def reclaim(self, bound_bytes: int, is_low: bool, kept_bytes: int = 0) -> int:
        """Return that nothing is dead."""
        return 0

    def compacted_s(self) -> float:
        """Return that nothing is compacted."""
        return 0.0

    def reopen(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
