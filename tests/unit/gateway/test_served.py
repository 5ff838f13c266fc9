"""Which models are served: asked seldom, fresh before anything is refused."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import Unavailable
from penstock.scheduler.v1 import scheduler_pb2 as pb
from services.gateway.problem import Problem
from services.gateway.served import FRESH_S, STALE_S, Served, view_of


class Scheduler:
    """Answers with `status`, counts how often, and is away when told."""

    def __init__(self, *workers: pb.WorkerStatus) -> None:
        self.status = pb.StatusResponse(workers=workers)
        self.asked = 0
        self.away = False
        self.now_s = 100.0
        self.served = Served(self.answer, lambda: self.now_s)

    async def answer(self) -> pb.StatusResponse:
        self.asked += 1
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("away")
        return self.status


def worker(name: str, model: str, *aliases: str, connected: bool = True) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id=name, model=model, model_aliases=aliases, connected=connected)


def test_a_view_has_the_names_of_connected_workers() -> None:
    view = view_of(pb.StatusResponse(workers=[worker("a", "m", "alias"), worker("b", "gone", connected=False)]))
    assert (view.names, view.workers, view.models) == ({"m": "m", "alias": "m"}, {"a": "m"}, ["m"])
    assert (view.model_of("alias"), view.model_of("x"), view.model_of("")) == ("m", "", "m")


async def test_many_requests_ask_once_in_a_while() -> None:
    scheduler = Scheduler(worker("a", "m"))
    await asyncio.gather(*(scheduler.served.check("m") for _ in range(50)))
    assert scheduler.asked == 1
    scheduler.now_s += STALE_S + 1
    await scheduler.served.check("m")
    assert scheduler.asked == 2


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
