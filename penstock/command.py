"""The `penstock` command's first lines: nearly nothing is imported before them, and from then on an interrupt is quiet.

Ctrl-C, SIGTERM and the end of the terminal are interrupts, unless who starts the command has it ignore them (nohup).
"""

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
        import atexit
        import signal

        usual = {signal.SIG_DFL, signal.default_int_handler}
        interrupts = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) in usual]

        def end_at_once(status: object) -> None:
            """Have an interrupt end the process as it is, which holds nothing then."""
            number = status if isinstance(status, int) else 0 if status is None else 1
            for one in interrupts:
                signal.signal(one, lambda _number, _frame: os._exit(number))

        def ignore() -> None:
            """Ignore what the interpreter, which ends now, would give back its usual effect: death by the signal."""
            for one in interrupts:
                signal.signal(one, signal.SIG_IGN)

        atexit.register(ignore)
        # An exception would be what some import makes of it: another exception, or a line on stderr and no end.
        end_at_once(EX_INTERRUPTED)
        from penstock.cli.main import main as command

        for one in interrupts:
            signal.signal(one, signal.default_int_handler)
        try:
            command()
        except SystemExit as ended:
            # All is done and said: what ends now are the interpreter and its threads.
            end_at_once(ended.code)
            raise
    except KeyboardInterrupt:
        sys.exit(EX_INTERRUPTED)
