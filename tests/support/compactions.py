"""A column family whose compactions are noted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Pieces:
    """Stands in for a family: what is compacted, and what blob files each compaction made."""

    def __init__(
        self,
        family: Any,
        directory: Path,
        after: Callable[[], None] = lambda: None,
        flushed: Callable[[], None] = lambda: None,
    ) -> None:
        self._family, self._directory, self._after, self._flushed = family, directory, after, flushed
        self.made: list[int] = []
        self.ranges: list[tuple[bytes | None, bytes | None]] = []

    def compact_range(self, start: bytes | None, end: bytes | None, options: Any) -> None:
        before = set(self._directory.glob("*.blob"))
        self._family.compact_range(start, end, options)
        self.made.append(sum(path.stat().st_size for path in set(self._directory.glob("*.blob")) - before))
        self.ranges.append((start, end))
        self._after()

    def flush(self, waits: bool) -> None:
        self._family.flush(waits)
        self._flushed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)
