"""File descriptors: a service has one for every connection, a queue also for every file of its store."""

from __future__ import annotations

import resource
from typing import Final

FILES_WANTED: Final = 1 << 20
"""Where the hard limit allows as many: a store of some hundred gigabytes has thousands of files, and the soft limit is
often 1,024, which protects programs that call select(2). Nobody here does."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as is wanted and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
