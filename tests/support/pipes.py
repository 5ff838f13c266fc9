"""A file that is a pipe of the shell: `command <(...)`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pipe_with(text: str) -> Iterator[str]:
    """Yield the path of a pipe that holds `text` and ends after it; processes started meanwhile may inherit it."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.write(writer, text.encode())
    os.close(writer)
    try:
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)
