"""What the queue asks of a store: column families of ordered bytes, and atomic durable writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from services.queue.core.effects import Write

Row: TypeAlias = tuple[bytes, bytes]

T = TypeVar("T")


class StoreError(Exception):
    """The store cannot read or write now."""


class StoreDamagedError(StoreError):
    """What is read is not what was written; trying again does not help."""


class StoreUnusableError(Exception):
    """The data directory cannot be used at all: locked, of a newer schema, or damaged."""


class StoreUnreadableError(StoreUnusableError):
    """It is damaged, so that it cannot even be opened."""


class Store(Protocol):
    """An ordered, durable key-value store with the families of `core.records`.

    Methods may be called from any thread. All but `keep_reserve` and `close` raise StoreError if the disk fails.
    """

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the row of `key`, or None."""

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of `keys`, in order, None where there is none."""

    def may_hold(self, family: str, key: bytes) -> bool:
        """Return False only if there is no row of `key`; looks at memory alone, so an event loop may call it."""

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, by key; an empty `end` means to the last."""

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Return at most `limit` rows with start <= key < end, from the last downwards; `end` as for `scan`."""

    def write(self, writes: Sequence[Write]) -> None:
        """Apply all writes, or none; on return they survive a crash of the machine.

        Reads may find them before.
        """

    def write_at_once(self, writes: Sequence[Write]) -> bool:
        """Do as `write` and return True, unless another write or the store itself would have to be waited for.

        Then return False, with nothing applied: an event loop may call it, where the disk is fast.
        """

    def doubt(self) -> str:
        """Return why it is unknown what of the store survives a crash; empty if that is known.

        While it is, `write` and `wait_durable` raise StoreError. `reopen` ends it.
        """

    def write_failure(self) -> str:
        """Return why the last write failed, whoever made it; empty if it did not, or the store was opened since."""

    def wait_durable(self) -> None:
        """Return once all that the caller has read survives a crash: whoever tells of it calls this before.

        It waits for the write that is being made, so an event loop may not call it.
        """

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy of everything written so far to `path`, a new directory."""

    def disk_free_bytes(self) -> int:
        """Return the free bytes of the disk under the store."""

    def make_room(self) -> bool:
        """Return whether there is room to open the store again; its reserve is given up for that if it must be."""

    def is_reserve_given_up(self) -> bool:
        """Return whether the disk has been so full, and the reserve could not be made again; looks at memory alone."""

    def keep_reserve(self) -> None:
        """Make the reserve of disk space where it is missing and there is room for it. Blocks; never raises."""

    def reclaim(self, bound_bytes: int, is_low: bool, kept_bytes: int = 0) -> int:
        """Give back the disk space of deleted payloads, results and parts, if more than `bound_bytes` of it are dead,
        and all that is worth it if `is_low`, there being little; return the bytes. Blocks, and holds up no write.

        What that takes for a while leaves `kept_bytes` free, as long as there is more. What is deleted of small rows
        goes as well, where reads would walk over many.
        """

    def compacted_s(self) -> float:
        """Return the seconds that `reclaim` has compacted since the store was opened, flushes before that aside."""

    def reopen(self) -> None:
        """Close and open again, to leave an error the store cannot recover from by itself; what it holds is durable."""

    def close(self) -> None:
        """Release the store, whatever state it is in; nothing but `reopen` may be called after."""


def write_reopening(store: Store, writes: Sequence[Write]) -> None:
    """Write; if that fails though there is room to open the store again, or in doubt, do so and write once more.

    Blocks. Raises StoreError if that fails too.
    """
    try:
        store.write(writes)
    except StoreError:
        if not store.make_room() and not store.doubt():
            raise
        store.reopen()
        store.write(writes)


def durably(store: Store, work: Callable[[], T]) -> T:
    """Read with `work`; return, or raise, what it found once that is durable. Blocks, as `wait_durable` does."""
    try:
        return work()
    finally:
        store.wait_durable()  # also before it is said that there is nothing
