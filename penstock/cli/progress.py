"""Progress of a batch run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Timer
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from penstock.batch.reader import LINE_FIELDS
from penstock.batch.summary import Tally
from penstock.telling import tell

PLAIN_EVERY_S = 5.0
"""Time between progress lines in a log."""

RATE_SPAN_S = 10.0
"""Rates are means over at least this time, so that they can be read."""

MOST_NOT_READ = 10
"""Fields that are named as not read: lines may have others each."""


class Rate:
    """Requests and tokens per second over the last `RATE_SPAN_S` to twice that."""

    def __init__(self, now_s: float) -> None:
        """Begin at `now_s` seconds of any clock."""
        self._older = self._newer = (now_s, 0, 0)

    def update(self, now_s: float, requests: int, tokens: int) -> tuple[float, float]:
        """Return (requests/s, tokens/s) given the totals so far."""
        if now_s - self._newer[0] >= RATE_SPAN_S:
            self._older, self._newer = self._newer, (now_s, requests, tokens)
        since_s, requests_then, tokens_then = self._older
        elapsed_s = max(now_s - since_s, 1e-3)
        return (requests - requests_then) / elapsed_s, (tokens - tokens_then) / elapsed_s


def to_stderr(text: str) -> None:
    """Print a line."""
    tell(text, sys.stderr)


@contextmanager
def said_if_long(text: str, say: Callable[[str], None] = to_stderr) -> Iterator[None]:
    """Say `text` once the work within has taken as long as there may be between two lines of a log."""
    timer = Timer(PLAIN_EVERY_S, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress:
    """Shows how a run goes, on stderr."""

    def __init__(self, lines: int) -> None:
        """Prepare for a file of `lines` lines."""
        self._lines = lines
        self._console = Console(stderr=True, highlight=False)
        self._bar: Bar | None = None
        self._rate = Rate(time.monotonic())
        self._said_s = 0.0
        self._waited = False
        self._not_read: set[str] = set()

    def __enter__(self) -> Self:
        """Return the progress."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self.close()

    def begin(self, answered: int) -> None:
        """Say how much there is to do, and show the bar; `answered` lines have their answer in the journal."""
        self._said_s = time.monotonic()
        self._rate = Rate(self._said_s)
        self.say(f"{self._lines} lines, {answered} of them answered in the journal; the queue is asked for the others")
        if not self._console.is_terminal:
            return
        self._bar = Bar(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.add_task("", total=self._lines, completed=answered, rates="")
        with suppress(OSError):
            self._bar.start()

    def progressed(self, answered: int, tally: Tally) -> None:
        """Show that `answered` lines have their answer."""
        now_s = time.monotonic()
        requests_per_s, tokens_per_s = self._rate.update(now_s, tally.requests, tally.completion_tokens)
        rates = f"{requests_per_s:.1f} requests/s  {tokens_per_s:.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=answered, rates=rates)
        elif now_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = now_s
            earlier = f" ({tally.answered_earlier} of them earlier)" if tally.answered_earlier else ""
            left_s = (self._lines - answered) / requests_per_s if requests_per_s else 0.0
            left = f"  about {left_s:.0f} s left" if requests_per_s else ""
            self.say(f"{answered}/{self._lines} answered{earlier}  {rates}{left}")

    def not_read(self, names: Sequence[str], line: int) -> None:
        """Say of each of these fields once that it is not read, and which line is the first that has it."""
        for name in names:
            if name in self._not_read or len(self._not_read) > MOST_NOT_READ:
                continue
            self._not_read.add(name)
            if len(self._not_read) > MOST_NOT_READ:
                self.say(f"line {line} has one more field that is not read; no others are named")
            else:
                fields = ", ".join(LINE_FIELDS)
                self.say(f"{name[:80]!r} is not read, first in line {line}: the fields of a line are {fields}")

    def passed(self, lines: int) -> None:
        """Say now and then of how many lines it has been seen that nothing is to be asked of them."""
        now_s = time.monotonic()
        if now_s - self._said_s >= PLAIN_EVERY_S:
            self._said_s = now_s
            self.say(f"{lines} of {self._lines} lines looked at again, for what is still to be asked")

    def waits(self, why: str) -> None:
        """Say once that the queue takes no more lines for now."""
        if not self._waited:
            self._waited = True
            self.say(f"the queue takes no more lines now ({why}); waiting for room")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one; nobody has to read it."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.console.print(text, markup=False)
        else:
            to_stderr(text)

    def close(self) -> None:
        """Take the bar away; a second call does nothing."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
            self._bar = None
