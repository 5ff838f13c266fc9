"""The tables of `status` fit the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import cast

import pytest
from rich.console import Console

from penstock.cli.errors import CommandError
from penstock.cli.status import as_object, need_both, refuse_silence, render
from penstock.client import Client
from penstock.errors import NobodyAnswers, PenstockError, Unauthenticated, Unavailable
from penstock.exits import EX_NOPERM, EX_UNAVAILABLE
from penstock.live.rates import Rates
from penstock.live.reader import take
from penstock.live.reading import Reading
from penstock.live.view import view_of
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse, TenantWaiting
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, EngineReport, StatusResponse, WorkerStatus

CHANNELS = ("batch", "interactive")


def snapshot(worker_id: str = "worker-1") -> Reading:
    """Two channels and one busy worker."""
    engine = EngineReport(running=31, waiting=2, kv_cache_usage=0.87, step_ns=12_300_000, preemptions=4)
    worker = WorkerStatus(
        worker_id=worker_id, model="meta-llama/Llama-3.1-8B-Instruct", capacity_blocks=27_431, free_blocks=1_234,
        held_blocks={"batch": 20_000, "interactive": 6_197}, engine=engine, connected=True,
    )  # fmt: skip
    queued = [ChannelStats(channel=name, ready=123_456, oldest_ready_age_ns=10**12, leased=512) for name in CHANNELS]
    running = [ChannelStatus(channel=name, running=512, held_blocks=20_000) for name in CHANNELS]
    return Reading(1.0, StatsResponse(channels=queued), StatusResponse(workers=[worker], channels=running), ())


def shown(now: Reading, width: int) -> str:
    """Return what a terminal of `width` columns shows."""
    console = Console(width=width, file=StringIO())
    console.print(render(now, {}, width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_nothing_is_cut_where_the_terminal_is_narrow(width: int) -> None:
    text = shown(snapshot(), width)
    assert "…" not in text
    for said in ("worker-1", "batch", "interactive", "held", "free", "waiting", "running", "123456", "1234", "26197"):
        assert said in text
    assert max(map(len, text.splitlines())) <= width


def test_a_wide_terminal_shows_everything() -> None:
    text = shown(snapshot(), 200)
    for said in ("held interactive", "blocks held", "requests/s", "preempted", "Llama-3.1-8B-Instruct", "12.3 ms"):
        assert said in text


def test_a_long_name_folds_and_keeps_its_letters() -> None:
    text = shown(snapshot("w" * 70), 80)
    assert text.count("w") >= 70 + 1
    assert "…" not in text


@pytest.mark.parametrize("name", ["mine[v2]", "[/none]", "[red]w[/red]", "host:100:1"])
def test_names_are_shown_letter_by_letter(name: str) -> None:
    """Rich would take brackets for its markup, and end the command over those that close nothing."""
    now = snapshot(name)
    assert now.fleet is not None
    now.fleet.workers[0].model = f"org/{name}"
    now.fleet.workers[0].held_blocks[name] = 1
    for width in (200, 300):
        text = shown(now, width)
        assert f" {name} " in text
        assert f" org/{name} " in text
    assert f" held {name} " in text


def test_a_name_gives_the_terminal_no_instructions() -> None:
    text = shown(snapshot("w\x1b[2J\r\n1"), 200)
    assert "\x1b" not in text
    assert "w\ufffd[2J\ufffd\ufffd1" in text


@pytest.mark.parametrize(
    ("connected", "another", "said"),
    [(True, True, "queue connected;"), (False, False, "queue NOT connected;"), (False, True, "queue standby (")],
)
def test_a_scheduler_that_stands_by_is_told_from_one_that_lacks_its_queue(
    connected: bool, another: bool, said: str
) -> None:
    queue, fleet = StatsResponse(scheduler_connected=another), StatusResponse(queue_connected=connected)
    assert said in shown(Reading(1.0, queue, fleet, ()), 200)


def test_the_tenants_of_which_most_waits_are_named_if_there_are_several() -> None:
    evil = TenantWaiting(tenant="evil", requests=1436, bytes=1_940_000)
    good = TenantWaiting(tenant="go\nod" + "x" * 500, requests=1, bytes=20)
    text = shown(Reading(1.0, StatsResponse(tenants=[evil, good]), None, ()), 400)
    assert rf"waiting by tenant: 'evil' 1436 (1.9 MB), 'go\nod{'x' * 59}' 1 (0.0 MB)" in text
    assert "by tenant" not in shown(Reading(1.0, StatsResponse(tenants=[evil]), None, ()), 200)


def names_only() -> Reading:
    """What a client's key gets to see."""
    queue = StatsResponse(store_id="s", names_only=True, channels=[ChannelStats(channel=name) for name in CHANNELS])
    return Reading(1.0, queue, None, ("the scheduler refuses to tell: a client may not",), refused=True)


def test_what_a_client_may_not_see_is_not_told_as_nothing() -> None:
    text = shown(names_only(), 200)
    assert "interactive" in text
    assert not any(letter.isdigit() for letter in text)
    queue = as_object(names_only())["queue"]
    assert [(one["channel"], one["ready"], one["ended_by_outcome"]) for one in queue["channels"]] == [
        ("batch", None, None), ("interactive", None, None),
    ]  # fmt: skip
    told = {name: value for name, value in queue.items() if value is not None and name != "channels"}
    assert told == {"store_id": "s", "names_only": True}
    view = view_of(names_only(), Rates().take(names_only()))
    assert {channel.waiting for channel in view.channels} == {None}
    assert (view.fleet.waiting, view.fleet.dead, view.fleet.results, view.fleet.requests_per_s) == (None,) * 4


def test_a_client_that_was_told_what_it_may_know_has_its_answer() -> None:
    need_both(names_only())
    with pytest.raises(CommandError) as ended:
        need_both(replace(names_only(), problems=("the scheduler does not answer",), refused=False))
    assert ended.value.status == EX_UNAVAILABLE


class Silent:
    """A client whose every question ends with the same error."""

    def __init__(self, error: PenstockError) -> None:
        self._error = error

    async def stats(self) -> StatsResponse:
        raise self._error

    async def fleet(self) -> StatusResponse:
        raise self._error


@pytest.mark.parametrize("need", [refuse_silence, need_both])
@pytest.mark.parametrize(
    ("error", "status", "said", "unsaid"),
    [
        (Unauthenticated("an API key is needed"), EX_NOPERM, "the queue refuses to tell: an API key", "penstock up"),
        (NobodyAnswers("nothing answers"), EX_UNAVAILABLE, "does not answer: nothing .*penstock up", "PENSTOCK_KEY"),
        (Unavailable("speaks HTTP/1.1"), EX_UNAVAILABLE, "the queue does not answer: speaks HTTP", "penstock up"),
    ],
)
async def test_who_may_not_know_is_told_so_and_not_to_start_what_runs(
    need: Callable[[Reading], None], error: PenstockError, status: int, said: str, unsaid: str
) -> None:
    reading = await take(cast(Client, Silent(error)))
    with pytest.raises(CommandError, match=said) as ended:
        need(reading)
    assert ended.value.status == status
    assert unsaid not in str(ended.value)
