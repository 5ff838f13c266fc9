"""What compactions leave alone since one of them met damage there.

A row that is damaged costs whoever asks for it an error, and nobody else. Compactions read rows that nobody asked for,
and one that meets damage makes RocksDB refuse every write until the store is opened again: which begins the same
compaction again. So each damage is met once. What is spared gives no disk space back; until a backup is restored that
costs less than a queue that stands still.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final

log = logging.getLogger(__name__)

TABLE_FILE: Final = re.compile(r"(\d+)\.sst")
"""The name of a table file, as RocksDB's errors have it. Those about blob files name none."""


class Spared:
    """Grows with each damage that ends the writes of a store, and lasts over its reopening, which makes it count."""

    def __init__(self) -> None:
        """Spare nothing."""
        self.families: set[str] = set()
        """Those that are not compacted at all: a table file of theirs is damaged."""
        self.blobs = False
        """Whether no blob is moved: one of them is damaged. Blob files in which nothing lives go all the same."""

    def note(self, error: str, families: Mapping[str, Any]) -> None:
        """Spare what a compaction found damaged, as `error` has it, in one of `families`, which are open."""
        found = _family_of(error, families)
        if found:
            self.families.add(found)
        elif self.blobs:  # damage that no error places, and of no blob
            self.families.update(families)
        else:
            self.blobs = True
        what = f"of {', '.join(sorted(self.families))} nothing is compacted" if self.families else "no blob is moved"
        log.error("a compaction met damage; from now on %s, until a backup is restored: %s", what, error)


def _family_of(error: str, families: Mapping[str, Any]) -> str:
    """Return whose table file an error names; empty if it names none, or that file is gone."""
    named = TABLE_FILE.search(error)
    if named is None:
        return ""
    line = re.compile(rf"^ {int(named.group(1))}:", re.MULTILINE)
    return next((name for name, db in families.items() if line.search(db.property_value("rocksdb.sstables") or "")), "")
