"""The file that a service's stderr goes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 15
"""Lines of a failed service's log that are shown."""

TAIL_BYTES = 65_536
"""As far back as they are looked for: a service may have logged for months."""

KEPT_BYTES = 64 * 1024 * 1024
"""A log that is larger is set aside when its service starts, in place of the one that was before."""


class ServiceLog:
    """One service's log. It is appended to, so that whoever cuts it short while it is written (`logrotate`) may."""

    def __init__(self, path: Path) -> None:
        """Keep the log at `path`."""
        self.path = path
        self._start_bytes = 0
        """Where the log of the present life begins; before it are those of earlier lives and earlier commands."""

    def open(self) -> BinaryIO:
        """Begin the log of another life. Raises OSError."""
        self.path.parent.mkdir(exist_ok=True)  # somebody may have cleared it away
        if self._size_bytes() > KEPT_BYTES:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        log = self.path.open("ab")
        self._start_bytes = log.tell()
        return log

    def tail(self) -> str:
        """Return the last lines that this life wrote."""
        size_bytes = self._size_bytes()
        # What has been cut short since is this life's as well.
        start_bytes = self._start_bytes if self._start_bytes <= size_bytes else 0
        if not size_bytes:
            return ""
        with self.path.open("rb") as log:
            log.seek(max(start_bytes, size_bytes - TAIL_BYTES))
            text = log.read(TAIL_BYTES).decode(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0
