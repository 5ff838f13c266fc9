"""What the clock said in the lives of a store: kept in it, so that a start can tell how old the rest of it is."""

from __future__ import annotations

import logging
from typing import Final

from services.queue.core import records
from services.queue.core.ages import COUNTED_GAP_NS, NO_GAPS
from services.queue.core.effects import Write
from services.queue.storage.read_faults import decoded
from services.queue.storage.store import Store, StoreDamagedError, write_reopening

log = logging.getLogger(__name__)

NOTE_NS: Final = 60 * 1_000_000_000
"""Between notes of the clock, each a small write of its own: a tenth of the shortest gap that is not counted."""


class Lives:
    """The clock of the present life, noted again and again, and the `ages` that follow from those before."""

    def __init__(self, store: Store, now_ns: int) -> None:
        """Begin a life at `now_ns`; raises StoreError if the store cannot be read or written."""
        self._store = store
        row = store.get(records.META, records.CLOCK_KEY)
        known_ns, before = (_newest_end(store), NO_GAPS) if row is None else decoded(records.decode_clock, row)
        self.ages = before
        self._noted_ns = now_ns
        if known_ns is None or 0 <= now_ns - known_ns <= COUNTED_GAP_NS:
            return  # what is known will do until the first note
        self.ages = before.begun(known_ns, now_ns)
        if now_ns > known_ns:
            log.warning(
                "this machine's clock is %.1f s past the last that this store knows of it: that is not counted as age "
                "of what it keeps, for nobody can tell a clock that was set from a queue that did not run",
                (now_ns - known_ns) / 1e9,
            )
        write_reopening(store, [self._clock(now_ns)])  # for what compactions meet at a start

    def is_note_due(self, now_ns: int) -> bool:
        """Return whether the last note is old enough for another one."""
        return now_ns - self._noted_ns >= NOTE_NS

    def note(self, now_ns: int) -> None:
        """Have the store know the clock; blocks on the disk, raises StoreError."""
        self._noted_ns = now_ns  # also if it fails: the next try is the next note
        self._store.write([self._clock(now_ns)])

    def _clock(self, now_ns: int) -> Write:
        return Write(records.META, records.CLOCK_KEY, records.encode_clock(now_ns, self.ages))


def _newest_end(store: Store) -> int | None:
    """Return when the last of the requests ended whose results are kept: what is known where no clock was noted."""
    try:
        rows = store.scan_back(records.EXPIRY, b"", b"", 1)
        return decoded(records.expiry_of, rows[0][0])[0] if rows else None
    except StoreDamagedError:
        return None  # a start has no need of it
