"""A disk of its own for the queue, small enough to be filled."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS = 0x00020000
"""`unshare` flag: a mount namespace of one's own (Linux)."""

REFILL_S = 0.1
"""While the disk is to be full, what becomes free is taken again this often."""


def leave_the_mounts() -> bool:
    """Give this process mounts of its own, which end with it and its children; False where that is not permitted."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    made = subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)
    return made.returncode == 0


class Disk:
    """A tmpfs of limited size. Call `leave_the_mounts` once before."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Mount it at `path`; raises OSError with the reason if that is not permitted."""
        path.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
        made = subprocess.run(mount, check=False, capture_output=True, text=True)
        if made.returncode != 0:
            raise OSError(made.stderr.strip())
        self.path = path
        self._ballast = path / "ballast"

    async def fill(self, seconds: float, leave_bytes: int) -> None:
        """Leave only so many bytes free for a while."""
        deadline_s = asyncio.get_running_loop().time() + seconds
        try:
            with self._ballast.open("wb") as ballast:
                while asyncio.get_running_loop().time() < deadline_s:
                    self._take(ballast.fileno(), leave_bytes)
                    await asyncio.sleep(REFILL_S)
        finally:
            self._ballast.unlink()

    def _take(self, ballast: int, leave_bytes: int) -> None:
        stats = os.statvfs(self.path)
        spare = stats.f_bavail * stats.f_frsize - leave_bytes
        if spare > 0:
            with suppress(OSError):  # another one took it first: full as well
                os.posix_fallocate(ballast, os.fstat(ballast).st_size, spare)
