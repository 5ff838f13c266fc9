"""What this process holds in memory."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """Return the memory of this process that is not swapped out."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
