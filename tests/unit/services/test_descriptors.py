"""How many files a service may have open."""

from __future__ import annotations

import asyncio
import resource

import pytest

from services import life
from services.descriptors import FILES_WANTED, raise_file_limit
from services.gateway import __main__ as gateway
from services.gateway import service

UNBOUNDED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that the process has had, soft and hard, the present ones last."""
    had = [(1024, UNBOUNDED)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: had[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: had.append(limits))
    return had


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, UNBOUNDED), (FILES_WANTED, UNBOUNDED)),
        ((1024, 2 * FILES_WANTED), (FILES_WANTED, 2 * FILES_WANTED)),
        ((2 * FILES_WANTED, UNBOUNDED), (2 * FILES_WANTED, UNBOUNDED)),
        ((UNBOUNDED, UNBOUNDED), (UNBOUNDED, UNBOUNDED)),
    ],
)
def test_the_limit_is_raised_as_far_as_is_wanted_and_allowed(
    limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.append(before)
    raise_file_limit()
    assert limits[-1] == after


def test_the_gateway_raises_it_once_and_as_the_others_do(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ListensError(SystemExit):
        """It is about to listen."""

    def listen(_: str) -> None:
        raise ListensError

    monkeypatch.setattr("sys.argv", ["gateway", "--listen", "127.0.0.1:0"])
    monkeypatch.setattr(gateway, "start_logging", lambda *_: None)
    monkeypatch.setattr(life, "stop_on_signals", asyncio.Event)
    monkeypatch.setattr(service, "bind", listen)
    with pytest.raises(ListensError):
        gateway.main()
    assert limits == [(1024, UNBOUNDED), (FILES_WANTED, UNBOUNDED)]
