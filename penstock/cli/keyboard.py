"""Keys pressed while a command draws on the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def key_pressed(keys: str) -> Iterator[asyncio.Event]:
    """Yield an event that is set once one of `keys` is pressed; the terminal is as before afterwards.

    Without a terminal to read from, the event is never set.
    """
    pressed = asyncio.Event()
    if not sys.stdin.isatty():
        yield pressed
        return
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if not typed:
            loop.remove_reader(descriptor)
        if set(typed.decode(errors="replace")) & set(keys):
            pressed.set()

    before = termios.tcgetattr(descriptor)
    # Letter by letter and without an echo, while Ctrl-C remains a signal.
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
