"""What `penstock drain` makes of a scheduler, and of a worker, that come and go while it waits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli import operations
from penstock.cli.errors import CommandError
from penstock.connection import Patience
from penstock.errors import NotFound, Unavailable
from penstock.fleet import BACK_WITHIN_S
from penstock.scheduler.v1 import scheduler_pb2 as pb


class Looks:
    """A client that is shown one fleet after the other, the last one for ever."""

    def __init__(self, *fleets: pb.StatusResponse) -> None:
        self.left = list(fleets)

    async def fleet(self) -> pb.StatusResponse:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def fleet(scheduler: str, *workers: pb.WorkerStatus) -> pb.StatusResponse:
    return pb.StatusResponse(instance_id=scheduler, workers=workers)


def w1(reservations: int, draining: bool = True, life: str = "w1-a", connected: bool = True) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker_id="w1", instance_id=life, reservations=reservations, draining=draining, connected=connected
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "DRAIN_POLL_S", 0.0)


async def drained(*fleets: pb.StatusResponse) -> str:
    """Wait for the drain of w1; return status and what is the matter, empty if it ends well."""
    client: Any = Looks(*fleets)
    try:
        await operations._drained(client, "w1")
    except CommandError as error:
        return f"{error.status} {error}"
    finally:
        assert len(client.left) == 1, "no look more or less"
    return ""


AWAY = "1 w1 is not connected to the scheduler: what runs on it, if it lives, is not known"
GRANTED = "1 w1 takes grants again: it was started anew or undrained"


async def test_a_scheduler_that_was_started_anew_hears_of_the_drain_from_the_worker() -> None:
    news = (fleet("B"), fleet("B", w1(2)), fleet("B", w1(0)))
    assert await drained(fleet("A", w1(2)), *news) == ""
    assert await drained(*news) == "", "nor had anything been seen of the scheduler before"


async def test_a_worker_that_comes_back_with_all_it_has_is_waited_for() -> None:
    lost, back = fleet("A", w1(2, connected=False)), fleet("A", w1(2))
    assert await drained(back, lost, fleet("A"), back, fleet("A", w1(0))) == ""


@pytest.mark.parametrize("last", [fleet("A"), fleet("B", pb.WorkerStatus(worker_id="w2", connected=True))])
async def test_what_stays_in_doubt_is_said_as_it_is_known(
    last: pb.StatusResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "BACK_WITHIN_S", 0.0)
    assert await drained(fleet("A", w1(2)), last) == AWAY


@pytest.mark.parametrize(
    "last",
    [
        fleet("A", w1(2, draining=False)),
        fleet("A", w1(0, draining=False)),
        fleet("A", w1(0, draining=False, life="w1-b")),
        fleet("B", w1(0, draining=False, life="w1-b")),
        fleet("B", w1(2, draining=False)),
    ],
    ids=["undrained", "undrained, and idle", "started anew", "started anew, with the scheduler", "did not hear of it"],
)
async def test_a_worker_that_takes_grants_for_certain_is_not_waited_for(
    last: pb.StatusResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "BACK_WITHIN_S", 1e9)
    assert await drained(fleet("A", w1(2)), last) == GRANTED


class Scheduler:
    """A client whose scheduler, at each order, is away, or does not know w1 and is up for so many seconds; in the end
    it does what it is told."""

    def __init__(self, *up_s: float | None) -> None:
        self.left = list(up_s)
        self.up_s = 0.0

    async def order(self, worker: str) -> int:
        if not self.left:
            return 3
        up_s = self.left.pop(0)
        if up_s is None:
            raise Unavailable("away")
        self.up_s = up_s
        raise NotFound(f"no worker is called {worker!r}")

    async def fleet(self) -> pb.StatusResponse:
        return pb.StatusResponse(up_ns=int(self.up_s * 1e9))


class Patient(Patience):
    """Does not pause."""

    async def wait_or_raise(self, error: Exception) -> None:
        self._retry_for_s -= 1
        if self._retry_for_s < 0:
            raise error


@pytest.fixture
def counted_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "Patience", Patient)


@pytest.mark.usefixtures("counted_patience")
async def test_an_order_waits_for_a_scheduler_that_is_away_and_for_a_worker_that_may_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client: Any = Scheduler(None, None, 0.1, 0.4, None, 0.0)
    assert await operations._told(client, "w1", client.order) == 3
    assert capsys.readouterr().err.splitlines() == [
        "the scheduler does not answer; waiting for at most 10 s",
        "w1 is not connected to the scheduler; waiting for at most 10 s",
    ]


@pytest.mark.usefixtures("counted_patience")
async def test_an_order_gives_up_what_stays_away() -> None:
    away: Any = Scheduler(*[None] * 99)
    with pytest.raises(Unavailable, match="away"):
        await operations._told(away, "w1", away.order)
    for up_s in (0.0, 1.0):  # 0: it does not tell
        missing: Any = Scheduler(*[up_s] * 99)
        with pytest.raises(CommandError, match="w1 is not connected to the scheduler: what runs on it"):
            await operations._told(missing, "w1", missing.order)


async def test_a_worker_that_the_scheduler_would_know_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    client: Any = Scheduler(BACK_WITHIN_S)
    with pytest.raises(NotFound, match="no worker is called 'w1'"):
        await operations._told(client, "w1", client.order)
    assert (client.left, capsys.readouterr().err) == ([], "")
