"""Lines for whoever looks on: one that cannot be written ends nothing."""

from __future__ import annotations

import atexit
import codecs
import io
import os
import sys
from typing import TextIO


def tell(text: str, stream: TextIO) -> None:
    """Print a line at once; one that cannot be written (a reader that left, a full disk) is no reason to stop."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        give_up_unwritten()


def escape_unknown(stream: TextIO, handler: str = "backslashreplace") -> None:
    """Have `stream` write what its encoding has no bytes for as an escape, or as `handler` has it, and not fail."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    # In the C locale Python writes the bytes of names that it could not decode; UTF-8 has bytes for all else.
    lacks = stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"
    if lacks or stream.errors in {"strict", "backslashreplace"}:
        stream.reconfigure(errors=handler)


def give_up_unwritten() -> None:
    """Have the interpreter drop at its end what could not be written."""
    atexit.unregister(_let_go)
    atexit.register(_let_go)


def _let_go() -> None:
    """Drop what still cannot be written: the interpreter's own last attempt would make 120 of the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
