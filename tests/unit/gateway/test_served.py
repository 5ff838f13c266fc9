"""Which models are served: asked seldom, fresh before anything is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from penstock.credentials import Credentials, pass_on
from penstock.errors import Unavailable
from penstock.fleet import BACK_WITHIN_S
from penstock.scheduler.v1 import scheduler_pb2 as pb
from services.gateway.problem import Problem
from services.gateway.served import FRESH_S, LATELY_S, STALE_S, WORN_S, Served, view_of

STRANGERS: ContextVar[str] = ContextVar("strangers", default="")
"""What a caller has in its context."""


class Scheduler:
    """Answers with `status`, counts how often, and is away when told."""

    def __init__(self, *workers: pb.WorkerStatus) -> None:
        self.status = pb.StatusResponse(workers=workers)
        self.asked = 0
        self.away = False
        self.looked: Callable[[], object] = lambda: None
        self.failure: Exception | None = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.now_s = 100.0
        self.served = Served(self.answer, lambda: self.now_s)

    async def answer(self) -> pb.StatusResponse:
        self.asked += 1
        self.looked()
        await self.answering.wait()
        if self.failure is not None:
            raise self.failure
        if self.away:
            raise Unavailable("away")
        return self.status


def worker(name: str, model: str, *aliases: str, connected: bool = True) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id=name, model=model, model_aliases=aliases, connected=connected)


def test_a_view_has_the_names_of_connected_workers() -> None:
    view = view_of(pb.StatusResponse(workers=[worker("a", "m", "alias"), worker("b", "gone", connected=False)]))
    assert (view.names, view.workers, view.models) == ({"m": "m", "alias": "m"}, {"a": "m"}, ["m"])
    assert (view.model_of("alias"), view.model_of("x"), view.model_of("")) == ("m", "", "m")


def test_an_adapter_answers_under_its_own_name() -> None:
    told = worker("a", "m", "alias", "tuned")
    told.adapters.append("tuned")
    view = view_of(pb.StatusResponse(workers=[told]))
    assert view.names == {"m": "m", "alias": "m", "tuned": "m"}
    assert (view.model_of("tuned"), view.model_of("alias"), view.model_of("")) == ("tuned", "m", "m")


async def test_many_requests_ask_once_in_a_while() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await asyncio.gather(*(scheduler.served.check("m") for _ in range(50)))
    assert scheduler.asked == 1
    scheduler.now_s += STALE_S + 1
    await asyncio.gather(*(scheduler.served.check("m") for _ in range(50)))
    await scheduler.served.view()
    assert scheduler.asked == 2


async def test_a_known_model_waits_for_no_look() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await scheduler.served.check("m")
    answers = scheduler.answering = asyncio.Event()
    scheduler.now_s += STALE_S + 1
    before = len(asyncio.all_tasks())
    async with asyncio.timeout(30):
        for _ in range(50):
            await scheduler.served.check("m")
        assert len(asyncio.all_tasks()) == before + 1
        await asyncio.sleep(0)
    assert scheduler.asked == 2, "it is looked beside the requests"
    scheduler.status.workers[0].model = "next"
    answers.set()
    assert (await scheduler.served.view()).models == ["next"]
    assert scheduler.asked == 2, "who wants a newer view waits for the look under way"
    before = len(asyncio.all_tasks())
    await scheduler.served.check("next")
    assert len(asyncio.all_tasks()) == before, "a fresh view is left alone"


async def test_no_request_waits_for_a_scheduler_that_is_away() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await scheduler.served.check("m")
    scheduler.away = True
    scheduler.now_s += STALE_S + 1
    for _ in range(50):
        await scheduler.served.check("m")
        await asyncio.sleep(0)
    assert scheduler.asked == 2, "it is asked again only after a while"


async def test_a_look_that_fails_in_another_way_is_logged_and_not_repeated_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler(worker("a", "m"))
    await scheduler.served.check("m")
    scheduler.status.Clear()
    scheduler.failure = RuntimeError("a defect")
    scheduler.now_s += STALE_S + 1
    for _ in range(50):
        await scheduler.served.check("m")
        await asyncio.sleep(0)
    assert scheduler.asked == 2
    assert [record.message for record in caplog.records] == ["what is served cannot be looked at"]


async def test_a_look_is_the_gateways_own_and_keeps_no_clients_key() -> None:
    own, seen = Credentials("own").metadata(), []
    scheduler = Scheduler(worker("a", "m"))
    scheduler.looked = lambda: seen.append((Credentials("own").metadata(), STRANGERS.get()))

    async def ask() -> None:
        pass_on("Bearer a-client")
        STRANGERS.set("the client's")
        await scheduler.served.check("m")

    await asyncio.create_task(ask())
    scheduler.now_s += STALE_S + 1
    await asyncio.create_task(ask())
    await scheduler.served.view()
    assert seen == [(own, "the client's"), (own, "")], "the first is waited for by the request itself"


async def test_an_old_view_is_renewed_before_it_is_used() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await scheduler.served.check("m")
    scheduler.status.workers[0].model = "next"
    scheduler.now_s += WORN_S + 1
    assert (await scheduler.served.check("m")).models == ["next"]


async def test_a_model_that_was_served_lately_is_waited_for_and_then_refused() -> None:
    tuned = worker("b", "m", "alias", "tuned")
    tuned.adapters.append("tuned")
    scheduler = Scheduler(worker("a", "other"), tuned)
    await scheduler.served.check("m")
    del scheduler.status.workers[1]
    for pause_s in (WORN_S + 1, LATELY_S - WORN_S - 1):
        scheduler.now_s += pause_s
        for name, answers in (("m", ""), ("alias", ""), ("tuned", "tuned")):
            view = await scheduler.served.check(name)
            assert (view.models, view.model_of(name), view.model_of("")) == (["other"], answers, "")
        assert set(await scheduler.served.names()) == {"other", "m", "alias", "tuned"}
        with pytest.raises(Problem, match=r"`no` does not exist. Served now: other\."):
            await scheduler.served.check("no")
    scheduler.now_s += STALE_S + 1
    with pytest.raises(Problem, match="`tuned` does not exist"):
        await scheduler.served.check("tuned")
    assert set(await scheduler.served.names()) == {"other"}
    assert set(scheduler.served._seen) == {"other"}, "what is refused is not remembered"


async def test_nothing_is_refused_while_workers_may_not_have_come_back_yet() -> None:
    scheduler = Scheduler(worker("a", "m"))
    scheduler.status.up_ns = int(BACK_WITHIN_S * 1e9) - 1
    view = await scheduler.served.check("other")
    assert (view.models, view.model_of("other"), view.model_of("")) == (["m"], "", ""), "nobody knows who will answer"
    assert set(await scheduler.served.names()) == set()
    scheduler.status.up_ns = int(BACK_WITHIN_S * 1e9)
    scheduler.now_s += FRESH_S * 2
    with pytest.raises(Problem, match="`other` does not exist"):
        await scheduler.served.check("other")
    assert set(await scheduler.served.names()) == {"m"}


async def test_an_unknown_model_is_refused_after_a_fresh_look() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await scheduler.served.check("m")
    scheduler.status.workers.append(worker("b", "new"))
    scheduler.now_s += FRESH_S * 2
    assert (await scheduler.served.check("new")).model_of("new") == "new"
    scheduler.now_s += FRESH_S * 2
    with pytest.raises(Problem, match="`no` does not exist") as refused:
        await scheduler.served.check("no")
    assert (refused.value.status, refused.value.error["code"]) == (404, "model_not_found")
    asked = scheduler.asked
    with pytest.raises(Problem):
        await scheduler.served.check("nor this")
    assert scheduler.asked == asked, "unknown names do not hammer the scheduler"


async def test_nothing_is_refused_without_workers_or_without_a_scheduler() -> None:
    empty = Scheduler()
    await empty.served.check("any")
    lost = Scheduler(worker("a", "m"))
    await lost.served.check("m")
    lost.away = True
    lost.now_s += STALE_S + 1
    assert (await lost.served.check("other")).models == ["m"], "what was seen last is still told"
    assert set(await empty.served.names()) == set(await lost.served.names()) == set()


async def test_the_names_for_a_batch_are_as_fresh_as_those_for_a_request() -> None:
    scheduler = Scheduler(worker("a", "m"))
    assert set(await scheduler.served.names()) == {"m"}
    scheduler.status.workers.append(worker("b", "new"))
    scheduler.now_s += FRESH_S * 2
    assert set(await scheduler.served.names()) == {"m", "new"}
    scheduler.away = True
    scheduler.now_s += STALE_S / 2
    assert set(await scheduler.served.names()) == {"m", "new"}, "it was seen a moment ago"
    scheduler.now_s += STALE_S
    assert set(await scheduler.served.names()) == set(), "nobody knows any more"
