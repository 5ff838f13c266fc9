"""Completions until the queue has recorded them: in memory up to a bound, beyond it in a file; none is ever dropped.

How many there can be is bounded by the leases of the worker (`max_inflight`): with the queue away nothing new is
claimed. How large they are together is bounded by nothing but the disk: a result may take megabytes of
log probabilities. The file is never larger than the most that was in it at once, each rounded up to a page.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO

from services.worker.pages import PAGE_BYTES, Pages

log = logging.getLogger("worker")

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of completions in memory: 4,096 leases (the queue's `max_inflight`) with 16 KiB each, which is a long answer."""


class Completions:
    """Encoded completions by run. The file has no name, and is gone with the process, as the leases are."""

    def __init__(self, most_bytes: int = MAX_KEPT_BYTES) -> None:
        """Keep at most `most_bytes` in memory."""
        self._most_bytes = most_bytes
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0
        self._spilled: dict[str, tuple[list[range], int, Callable[[], bytes]]] = {}
        """In which pages of the file, how many bytes, and what to say if they are there no more."""
        self._file: IO[bytes] | None = None
        self._pages = Pages()

    def __contains__(self, run_id: str) -> bool:
        """Return whether the run's completion is kept."""
        return run_id in self._kept or run_id in self._spilled

    @property
    def kept_bytes(self) -> int:
        """Bytes in memory."""
        return self._kept_bytes

    def keep(self, run_id: str, completion: bytes, lost: Callable[[], bytes]) -> None:
        """Keep the completion of a run; in memory even beyond the bound if the disk takes nothing.

        `lost` makes the completion that `read` returns where the disk does not give this one back.
        """
        if self._kept_bytes + len(completion) > self._most_bytes and self._spill(run_id, completion, lost):
            return
        self._kept[run_id] = completion
        self._kept_bytes += len(completion)

    def read(self, run_id: str) -> bytes:
        """Return the completion, or what stands for one that cannot be read; empty if the run has been forgotten."""
        if run_id in self._kept:
            return self._kept[run_id]
        if run_id not in self._spilled or self._file is None:
            return b""
        runs, length, lost = self._spilled[run_id]
        file = self._file.fileno()
        try:
            parts = [os.pread(file, stop - start, offset) for offset, start, stop in _places(runs, length)]
            completion = b"".join(parts)
            reason = f"{len(completion)} of {length} bytes are there"
        except OSError as error:
            completion, reason = b"", str(error)
        if len(completion) == length:
            return completion
        log.error("%s: its completion cannot be read back from %s: %s", run_id, tempfile.gettempdir(), reason)
        return lost()

    def forget(self, run_id: str) -> None:
        """Drop a completion that was recorded, or whose lease is lost."""
        self._kept_bytes -= len(self._kept.pop(run_id, b""))
        if run_id in self._spilled:
            self._release(self._spilled.pop(run_id)[0])

    def _spill(self, run_id: str, completion: bytes, lost: Callable[[], bytes]) -> bool:
        """Write into free pages of the file; return whether all of it was taken."""
        runs = self._pages.take(-(-len(completion) // PAGE_BYTES))
        if self._write(completion, runs):
            self._spilled[run_id] = runs, len(completion), lost
            return True
        self._release(runs)
        return False

    def _write(self, completion: bytes, runs: list[range]) -> bool:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="penstock-completions-")  # noqa: SIM115 (open as long as this)
            file = self._file.fileno()
            return all(
                os.pwrite(file, completion[start:stop], offset) == stop - start
                for offset, start, stop in _places(runs, len(completion))
            )
        except OSError:
            return False

    def _release(self, runs: list[range]) -> None:
        """Give pages back; of those at the end of the file the disk has its room again."""
        before = len(self._pages)
        self._pages.give_back(runs)
        if len(self._pages) < before and self._file is not None:
            with suppress(OSError):  # They are written over in their turn.
                os.ftruncate(self._file.fileno(), len(self._pages) * PAGE_BYTES)


def _places(runs: list[range], length: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each run is in the file, and from where to where in the completion is what it holds, in bytes."""
    start = 0
    for run in runs:
        stop = min(start + len(run) * PAGE_BYTES, length)
        yield run.start * PAGE_BYTES, start, stop
        start = stop
