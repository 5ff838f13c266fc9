"""The queue's store as a disk may behave: it fails, fills up, and what a failed write left may surface later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.queue.core.effects import Write
from services.queue.storage.store import Row, StoreError
from tests.support.memory_store import MemoryStore

PLENTY_BYTES = 1 << 40
LEAST_FREE_BYTES = 1 << 20


class SimStore(MemoryStore):
    """A store whose writes are durable when `write` returns, and not before.

    The queue's actor calls `write` at the end of a write's virtual time; a crash before it loses the batch whole,
    as RocksDB's log loses a batch whose checksum is not complete.
    """

    def __init__(self, on_batch: Callable[[Sequence[Write]], None]) -> None:
        """Make an empty store; `on_batch` is told of each batch right before it is applied."""
        super().__init__(PLENTY_BYTES)
        self._on_batch = on_batch
        self.writes_fail = False
        self.keeps_failed = False
        """Whether a write that fails has reached the disk all the same."""
        self.reads_fail = False
        self.syncs_fail = False
        """Whether a write shows and its sync fails, which leaves the store in doubt until it is opened again."""
        self.loses_unsynced = False
        """Whether it is gone then."""
        self._ghost: Sequence[Write] = ()
        self._doubt = ""
        self._unsynced: Sequence[Write] = ()
        self._before: tuple[dict[str, dict[bytes, bytes]], dict[str, list[bytes]]] = ({}, {})
        """Rows and keys without it."""

    @property
    def healthy(self) -> bool:
        """Whether reads and writes work."""
        return not (self.writes_fail or self.reads_fail or self._doubt or self.free_bytes < LEAST_FREE_BYTES)

    def write(self, writes: Sequence[Write]) -> None:
        """Apply all writes and make them durable, or raise StoreError."""
        self.wait_durable()
        if self.writes_fail or self.free_bytes < LEAST_FREE_BYTES // 2:
            if self.keeps_failed and not self._ghost:
                self._ghost = tuple(writes)
            raise StoreError("No space left on device" if not self.writes_fail else "Input/output error")
        self._ghost = ()
        if self.syncs_fail:
            self._apply_unsynced(writes)
        self._on_batch(writes)
        super().write(writes)

    def _apply_unsynced(self, writes: Sequence[Write]) -> None:
        rows = {family: dict(rows) for family, rows in self._rows.items()}
        self._before = (rows, {family: list(keys) for family, keys in self._keys.items()})
        self._unsynced, self._doubt = tuple(writes), "Input/output error"
        super().write(writes)
        self.wait_durable()

    def doubt(self) -> str:
        """Return why a sync failed."""
        return self._doubt

    def write_failure(self) -> str:
        """Return the same: its other writes that fail leave nothing to be opened anew."""
        return self._doubt

    def wait_durable(self) -> None:
        """Raise StoreError if a sync failed; else all that shows is durable."""
        if self._doubt:
            raise StoreError(self._doubt)

    def reopen(self) -> None:
        """Replay the log: what a failed write left in it is there now."""
        if self.reads_fail:
            raise StoreError("Input/output error")
        if self._doubt:
            self._rows, self._keys = self._before
            self._ghost = () if self.loses_unsynced else self._unsynced
            self._doubt, self._unsynced = "", ()
        ghost, self._ghost = self._ghost, ()
        if ghost:
            self._on_batch(ghost)
            super().write(ghost)

    def heal(self) -> None:
        """Be a good disk again."""
        self.writes_fail = self.reads_fail = self.syncs_fail = self.keeps_failed = False
        self.free_bytes = PLENTY_BYTES

    # ---- reads ----

    def _check(self) -> None:
        if self.reads_fail:
            raise StoreError("Input/output error")

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the row of `key`, or None."""
        self._check()
        return super().get(family, key)

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of `keys`, in order, None where there is none."""
        self._check()
        return super().get_many(family, keys)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, by key."""
        self._check()
        return super().scan(family, start, end, limit)
