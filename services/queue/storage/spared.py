"""What compactions leave alone since one of them met damage there.

A row that is damaged costs whoever asks for it an error, and nobody else. Compactions read rows that nobody asked for,
and one that meets damage makes RocksDB refuse every write until the store is opened again: which begins the same
compaction again. So each damage is met once. What is spared gives no disk space back; until a backup is restored that
costs less than a queue that stands still.

Damage is what was altered, and as well what the disk does not give back: a bad sector, a file that is missing. Where
RocksDB's own work fails again and again, and no error says of what, it is left undone altogether.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from services.queue.storage.opening import DAMAGE, NO_SPACE, NOT_OF_THE_DISK

log = logging.getLogger(__name__)

MOST_FAILURES: Final = 3
"""Of RocksDB's own work, which no error places, within `FAILURES_S`. Each ends the writes for seconds."""

FAILURES_S: Final = 3600.0
"""A compaction that fails again may take minutes until it does, and the queue rests between those it asks for."""

TABLE_FILE: Final = re.compile(r"(\d+)\.sst")
"""The name of a table file, as RocksDB's errors have it. Those about altered blobs name no file."""

READING: Final = re.compile(r"IO error: ([^:]*: )?[Ww]hile [^:]*(read|prefetch|stat a file)[^:]*: .*\d\.(sst|blob)\b")
"""An error of the system about a file that is read. With one that is being written something else is wrong."""


class Spared:
    """Grows with each damage that ends the writes of a store, and lasts over its reopening, which makes it count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Spare nothing; `clock` tells seconds."""
        self.families: set[str] = set()
        """Those that are not compacted at all: a table file of theirs is damaged."""
        self.blobs = False
        """Whether no blob is moved: one of them is damaged. Blob files in which nothing lives go all the same."""
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=MOST_FAILURES)

    def note(self, error: str, families: Mapping[str, Any]) -> None:
        """Spare what RocksDB's own work found damaged, as `error` has it, in one of `families`, which are open.

        All of them where it keeps failing, whatever it says. A disk that is full, and want of memory or of files to
        open, are no damage.
        """
        if NO_SPACE in error or NOT_OF_THE_DISK.search(error):
            return
        before = len(self.families), self.blobs
        self._spare(error, families)
        if before == (len(self.families), self.blobs):
            return
        what = f"of {', '.join(sorted(self.families))} nothing is compacted" if self.families else "no blob is moved"
        log.error("a compaction met damage; from now on %s, until a backup is restored: %s", what, error)

    def _spare(self, error: str, families: Mapping[str, Any]) -> None:
        is_damage = error.startswith(DAMAGE) or READING.match(error) is not None
        found = _family_of(error, families) if is_damage else ""
        if found and found not in self.families:
            self.families.add(found)
        elif is_damage and not found and not self.blobs:
            self.blobs = True
        elif is_damage or self._keeps_failing():  # also damage that no error places, and of no blob
            self.families.update(families)
            self.blobs = True

    def _keeps_failing(self) -> bool:
        self._failures.append(self._clock())
        return len(self._failures) == MOST_FAILURES and self._failures[-1] - self._failures[0] <= FAILURES_S


def _family_of(error: str, families: Mapping[str, Any]) -> str:
    """Return whose table file an error names; empty if it names none, or that file is gone."""
    named = TABLE_FILE.search(error)
    if named is None:
        return ""
    number = int(named.group(1))
    return next((name for name, db in families.items() if number in table_files(db)), "")


def table_files(family: Any) -> set[int]:
    """Return the numbers of the table files of a family."""
    lines = family.property_value("rocksdb.sstables") or ""
    return {int(number) for number in _TABLE_LINE.findall(lines)}


_TABLE_LINE: Final = re.compile(r"^ (\d+):", re.MULTILINE)
