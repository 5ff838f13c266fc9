"""A benchmark whose process ends says which one, instead of waiting for what it will never do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lifecycle import growth
from benchmarks.lifecycle.processes import Child
from benchmarks.recovery import fleet

LOOKS = 200
"""More than a process takes that ends at once."""


def child(name: str, directory: Path, program: str) -> Child:
    return Child(name, [sys.executable, "-c", program], directory / "log")


@pytest.fixture
def children(tmp_path: Path) -> Iterator[dict[str, Child]]:
    """Processes that wait for their standard input, and one, the worker w1, that has ended."""
    found = {name: child(name, tmp_path, "input()") for name in ("queue", "scheduler", "w0")}
    found["w1"] = child("w1", tmp_path, "")
    found["w1"].process.wait()
    yield found
    for one in found.values():
        one.kill()


def looks() -> Callable[[], None]:
    """Return what fails when it is called too often."""
    numbers = count()

    def look() -> None:
        if next(numbers) > LOOKS:
            pytest.fail("it waits without an end")

    return look


def test_the_ledgers_of_a_fleet_that_died_are_not_watched(
    children: dict[str, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "SAMPLE_S", 0.001)
    look = looks()

    def status(_request: Any) -> SimpleNamespace:
        look()
        return SimpleNamespace(grants=3, channels=[], workers=[])

    wanted = growth.Growth(workers=1, requests=4, requests_at_once=1, service_s=0.0)
    with pytest.raises(SystemExit, match=r"^w1 ended early$"):
        growth._watch_ledgers(SimpleNamespace(Status=status), list(children.values()), wanted, [])


class Stuck(fleet.Fleet):
    """A fleet that never does what is waited for, once something was killed in it."""

    def __init__(self, children: dict[str, Child]) -> None:
        self.queue_process, self.scheduler = children["queue"], children["scheduler"]
        self.workers = {name: children[name] for name in ("w0", "w1")}
        self._look = looks()

    def start_scheduler(self) -> Child:
        return self.workers["w0"]  # one that runs

    def status(self) -> Any:
        self._look()
        return SimpleNamespace(grants=0 if self.scheduler is self.workers["w0"] else 1000)

    def connected(self) -> int:
        return fleet.WORKERS - 1

    def submit(self, count: int, tokens: int) -> list[str]:
        return [str(number) for number in range(count)]

    def runs_on(self, names: Sequence[str]) -> dict[str, str]:
        self._look()
        return dict.fromkeys(names, "w0")


class NeverMissed(Stuck):
    """The same, and the queue never notices."""

    def connected(self) -> int:
        self._look()
        return fleet.WORKERS


@pytest.mark.parametrize(("kind", "part"), [(Stuck, fleet.regrant), (Stuck, fleet.loss), (NeverMissed, fleet.loss)])
def test_a_recovery_that_cannot_come_is_not_waited_for(
    kind: type[Stuck],
    part: Callable[[Path], Any],
    children: dict[str, Child],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def running(_directory: Path) -> Iterator[fleet.Fleet]:
        yield kind(children)

    monkeypatch.setattr(fleet, "running", running)
    monkeypatch.setattr(fleet, "LOOK_S", 0.001)
    with pytest.raises(SystemExit, match=r"^w1 ended early$"):
        part(tmp_path)
