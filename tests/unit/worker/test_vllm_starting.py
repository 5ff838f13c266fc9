"""An engine that takes long to start is said to, again and again, and no more once it has."""

from __future__ import annotations

import logging
import threading

import pytest

from services.worker.vllm.starting import telling_of_start
from tests.support.waiting import wait_for


def lines(caplog: pytest.LogCaptureFixture) -> int:
    return sum("the engine has been starting for" in record.getMessage() for record in caplog.records)


def tellers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine-start"]


def test_a_start_that_goes_on_is_told_of_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    with telling_of_start(0.001):
        wait_for(lambda: lines(caplog) > 1, "a second line")
    assert not tellers()


def test_a_start_that_fails_or_is_short_is_told_of_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    with pytest.raises(RuntimeError, match="no engine"), telling_of_start():
        raise RuntimeError("no engine")
    assert (tellers(), lines(caplog)) == ([], 0)
