"""The `penstock` command's first lines: nearly nothing is imported before them, so Ctrl-C is quiet from then on."""

from __future__ import annotations

import os
import sys

from penstock.exits import EX_INTERRUPTED  # which imports nothing


def main() -> None:
    """Import the command line, which takes most of a short command's time, and run it."""
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
