"""Batches that follow each other for as long as a test kills what answers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.batch.journal import journal_path
from tests.support.batch_lines import mixed

PATIENCE_S = 1800
"""For a batch to end."""


class Load:
    """`penstock run-batch`, outside the containers, again and again: one batch at a time, lines of its own in each."""

    def __init__(
        self, queue: str, directory: Path, count: int, max_tokens: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """Send batches of `count` lines to the queue at "HOST:PORT"; files go to `directory`."""
        self._queue = queue
        self._environment = {**os.environ, **(environment or {})}
        self._directory = directory
        self._count = count
        self._max_tokens = max_tokens
        self._batches: list[list[dict[str, Any]]] = []
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def lines(self) -> int:
        """Lines sent so far."""
        return self._count * len(self._batches)

    def go_on(self) -> None:
        """Start the next batch if none is running. Raises AssertionError if the last one failed."""
        if self._running is not None:
            status = self._running.poll()
            if status is None:
                return
            assert status == 0, self._said()
        number = len(self._batches)
        lines = mixed(self._count, self._max_tokens)
        for line in lines:
            line["custom_id"] = f"{number}-{line['custom_id']}"
        self._batches.append(lines)
        self._path("in").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "penstock", "run-batch", "-i", str(self._path("in")), "-o"]
        with self._path("log").open("wb") as log:
            self._running = subprocess.Popen(
                [*command, str(self._path("out")), "--queue", self._queue],
                stdout=log, stderr=log, env=self._environment,
            )  # fmt: skip

    def moved_on(self, lines: int) -> Callable[[], bool]:
        """Return what says whether `lines` more have been answered and a batch is under way; keeps batches coming.

        One that has only been started is not under way: its command gives up soon if it finds no queue at all.
        """
        self.go_on()
        least = self._answered() + lines

        def moved() -> bool:
            self.go_on()
            return self._answered() >= least and self._of_this_batch() > 0

        return moved

    def finish(self) -> int:
        """Wait for the last batch; return how many lines have exactly one good answer. Raises AssertionError."""
        assert self._running is not None
        assert self._running.wait(PATIENCE_S) == 0, self._said()
        return sum(self._check(number) for number in range(len(self._batches)))

    def stop(self) -> None:
        """Leave no process behind."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def _check(self, number: int) -> int:
        answers = [json.loads(line) for line in self._path("out", number).read_text().splitlines()]
        assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in self._batches[number]]
        assert all(answer["response"]["status_code"] == 200 for answer in answers)
        return len(answers)

    def _answered(self) -> int:
        """Return the lines of the finished batches and of the running one's journal."""
        return self._count * max(0, len(self._batches) - 1) + min(self._of_this_batch(), self._count)

    def _of_this_batch(self) -> int:
        """Return the lines of the running batch's journal."""
        journal = journal_path(self._path("out"))
        return journal.read_bytes().count(b"\n") if self._batches and journal.exists() else 0

    def _path(self, kind: str, number: int = -1) -> Path:
        """Return the path of a batch's file; of the last one's by default."""
        return self._directory / f"{number if number >= 0 else len(self._batches) - 1}.{kind}.jsonl"

    def _said(self) -> str:
        return self._path("log").read_text()[-2000:]
