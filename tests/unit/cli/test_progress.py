"""What is said of work that takes long before a line is answered."""

from __future__ import annotations

import time
from threading import Event, Timer

import pytest

from penstock.cli import progress
from penstock.cli.progress import Progress, said_if_long


def test_lines_that_are_passed_over_are_told_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    shown = Progress(300)
    shown.begin(200)
    capsys.readouterr()
    for lines in range(1, 201):
        now_s += 0.1
        shown.passed(lines)
    assert capsys.readouterr().err.splitlines() == [
        f"{lines} of 300 lines looked at again, for what is still to be asked" for lines in (50, 100, 150, 200)
    ]


def test_what_work_takes_long_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    said, texts = Event(), list[str]()

    def say(text: str) -> None:
        texts.append(text)
        said.set()

    with said_if_long("reading", say):
        assert said.wait(60)
    assert texts == ["reading"]


def test_work_that_is_over_soon_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = list[Timer]()

    class Noted(Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(progress, "Timer", Noted)
    with pytest.raises(KeyError), said_if_long("reading", pytest.fail):
        raise KeyError
    (timer,) = timers
    assert timer.finished.is_set()
    timer.join(60)
    assert not timer.is_alive()
