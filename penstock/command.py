"""The `penstock` command's first lines: nearly nothing is imported before them, so Ctrl-C is quiet from then on."""

from __future__ import annotations

import os
import sys

from penstock.exits import EX_INTERRUPTED  # which imports nothing


def _open_the_closed() -> None:
    """Have standard streams that are closed lead nowhere: what is printed goes there, and no file has their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def main() -> None:
    """Import the command line, which takes most of a short command's time, and run it."""
    _open_the_closed()
    try:
        import signal

        usual = signal.getsignal(signal.SIGINT)
        waits = usual is signal.default_int_handler  # who starts it with SIGINT ignored, as behind nohup, means that
        if waits:
            # An exception would be what some import makes of it: another exception, or a line on stderr and no end.
            signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EX_INTERRUPTED))
        from penstock.cli.main import main as command

        if waits:
            signal.signal(signal.SIGINT, usual)
        command()
    except KeyboardInterrupt:
        sys.exit(EX_INTERRUPTED)
