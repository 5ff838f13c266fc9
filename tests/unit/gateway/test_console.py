"""The console's data and actions against a queue and a scheduler in memory; `test_console_page` looks at the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from penstock.client import Client
from penstock.live.reading import Reading
from penstock.live.view import view_of
from penstock.openai.bodies import COMPLETIONS_URL
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway.admission import Admission
from services.gateway.app import Front, make_app
from services.gateway.console.life import ConsoleLife
from services.gateway.console.lookout import MOST_DEAD, MOST_HELD, MOST_WORKERS, shown_of
from services.gateway.console.routes import MOST_NAMED
from services.gateway.generation import Parts
from services.gateway.group import Group
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.settings import GatewaySettings
from services.telemetry import Telemetry
from tests.support.asgi import Answer, Visit, post
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.waiting import wait_for_async

HOST = "127.0.0.1:7415"
OURS = {"host": HOST, "origin": f"http://{HOST}"}


class CountingQueue(FakeQueue):
    """Counts how often its numbers are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def Stats(self, request: queue_pb2.StatsRequest, context: Any) -> queue_pb2.StatsResponse:
        self.asked += 1
        return await super().Stats(request, context)


@asynccontextmanager
async def console(queue: FakeQueue, scheduler: FakeScheduler, **settings: Any) -> AsyncIterator[Starlette]:
    """A gateway with a console."""
    async with serving(queue) as address, serving_scheduler(scheduler) as fleet_address, Client(address) as client:
        metrics = GatewayMetrics(CollectorRegistry())
        served = Served(client.fleet, lambda: 0.0)
        parts = Parts(client, Admission(client, metrics), Intake(5), served, metrics, Telemetry(None))
        given = GatewaySettings(queue_address=address, scheduler_address=fleet_address, **settings)
        life = ConsoleLife(given, parts)
        try:
            yield make_app(parts, Front(parts), life.routes)
        finally:
            await life.close()


async def look(app: Starlette, path: str, host: str = HOST) -> Answer:
    return await Visit(app, "GET", path, b"", {"host": host}).whole()


async def test_everything_is_told_at_once() -> None:
    queue = FakeQueue()
    queue.dead = [
        queue_pb2.DeadLetter(request_id=f"d-{n}", channel="batch", attempts=3, last_error="x" * 9000)
        for n in range(MOST_DEAD + 5)
    ]
    workers = [
        scheduler_pb2.WorkerStatus(worker_id=f"w-{n:03}", connected=n != 101, capacity_blocks=10)
        for n in range(MOST_WORKERS + 3)
    ]
    status = scheduler_pb2.StatusResponse(workers=workers, queue_connected=True)
    async with console(queue, FakeScheduler(status)) as app:
        body = {"model": "", "prompt": "the river"}
        asked = await post(app, COMPLETIONS_URL, body, x_penstock_channel="batch").whole()
        told = (await look(app, "/console/state")).json()
        assert [channel["name"] for channel in told["channels"]] == ["batch"]
        assert (len(told["workers"]), told["workers_left_out"], told["states_left_out"]) == (MOST_WORKERS, 3, "3 up")
        chosen = [(worker["name"], worker["state"]) for worker in told["workers"]]
        assert chosen[:-1] == [(f"w-{n:03}", "up") for n in range(MOST_WORKERS - 1)]
        assert chosen[-1] == ("w-101", "gone")
        assert told["fleet"]["capacity_blocks"] == 10 * (
            MOST_WORKERS + 2
        )  # those left out too, and not one that is gone
        # One reading has been taken: a sample of each, taken just now.
        (age_s,) = told["history"]["ages_s"]
        assert 0 <= age_s < 60
        assert told["history"]["usage"] == {worker["name"]: [0.0] for worker in told["workers"]}
        assert [letter["request_id"] for letter in told["dead"]] == [f"d-{n}" for n in range(MOST_DEAD)]
        assert len(told["dead"][0]["last_error"]) == 500
        # This queue keeps no batches, and does not even know the call.
        assert told["batches"] is None
        (recent,) = told["recent"]
        assert (recent["request_id"], recent["status"], recent["channel"]) == (
            asked.headers["x-request-id"],
            200,
            "batch",
        )
        timeline = (await look(app, f"/console/requests/{recent['request_id']}")).json()
        assert (timeline["status"], timeline["completion_tokens"]) == ("completed", 2)
        assert (await look(app, "/console/requests/nobody")).status == 404


async def test_a_worker_that_the_scheduler_has_forgotten_leaves_a_trace() -> None:
    there = [scheduler_pb2.WorkerStatus(worker_id=name, model="m", connected=True) for name in ("w1", "w2")]
    scheduler = FakeScheduler(scheduler_pb2.StatusResponse(workers=there, queue_connected=True))
    async with console(FakeQueue(), scheduler) as app:
        assert (await look(app, "/console/state")).json()["departed"] == []
        scheduler.statuses = [scheduler_pb2.StatusResponse(workers=there[1:], queue_connected=True)]

        async def gone() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await look(app, "/console/state")).json()["departed"]
            return found

        (left,) = await wait_for_async(gone, "a worker that has left")
        assert (left["name"], left["model"], left["was"]) == ("w1", "m", "up")
        assert left["ago_s"] > 0


def test_a_large_fleet_with_many_channels_is_a_poll_of_some_hundred_kilobytes_at_most() -> None:
    channels = [f"channel-{n:02}" for n in range(60)]
    workers = [
        scheduler_pb2.WorkerStatus(
            worker_id=f"worker-{n:03}", model="meta-llama/Llama-3.1-8B-Instruct", connected=True, capacity_blocks=10**5,
            held_blocks={name: 1000 + place for place, name in enumerate(channels)},
        )
        for n in range(500)
    ]  # fmt: skip
    running = [scheduler_pb2.ChannelStatus(channel=name) for name in channels]
    status = scheduler_pb2.StatusResponse(workers=workers, channels=running)
    told = shown_of(view_of(Reading(0.0, None, status, ()), {}))
    assert len(json.dumps(told)) < 100_000
    assert (len(told["channels"]), told["channels_left_out"]) == (60, 0)
    worker = told["workers"][0]
    assert list(worker["held_blocks"]) == channels[-MOST_HELD:]
    assert worker["other_channels"] == 60 - MOST_HELD
    assert worker["other_blocks"] + sum(worker["held_blocks"].values()) == sum(range(1000, 1060))


async def test_the_name_of_several_prompts_says_which_requests_it_stands_for() -> None:
    async with console(FakeQueue(), FakeScheduler()) as app:
        for count, said in ((3, "r-0, r-1, r-2"), (MOST_NAMED + 2, ", and 2 more")):
            body = {"model": "", "prompt": ["the river"] * count}
            asked = await post(app, COMPLETIONS_URL, body).whole()
            refused = await look(app, f"/console/requests/{asked.headers['x-request-id']}")
            assert (refused.status, refused.error["param"]) == (404, "request_id")
            assert f"stands for {count} requests" in refused.error["message"]
            assert refused.error["message"].endswith(said)
        unknown = await look(app, f"/console/requests/{Group.of('', 2).name}")
        assert (unknown.status, "stands for 2 requests" in unknown.error["message"]) == (404, True)


async def test_many_viewers_are_one_reading() -> None:
    queue = CountingQueue()
    async with console(queue, FakeScheduler()) as app:
        answers = await asyncio.gather(*(look(app, "/console/state") for _ in range(50)))
        assert {answer.status for answer in answers} == {200}
        assert queue.asked == 1


async def test_a_queue_that_is_away_is_a_problem_and_no_error() -> None:
    async with (
        serving_scheduler(FakeScheduler()) as scheduler,
        serving(FakeQueue()) as address,
        Client(address) as client,
    ):
        metrics = GatewayMetrics(CollectorRegistry())
        served = Served(client.fleet, lambda: 0.0)
        parts = Parts(client, Admission(client, metrics), Intake(5), served, metrics, Telemetry(None))
        life = ConsoleLife(GatewaySettings(queue_address="127.0.0.1:1", scheduler_address=scheduler), parts)
        app = make_app(parts, Front(parts), life.routes)
        told = (await look(app, "/console/state")).json()
        assert told["problems"][0].startswith("the queue does not answer: nothing answers on 127.0.0.1:1")
        assert (told["fleet"]["dead"], told["dead"], told["batches"]) == (None, None, None)
        answer = await post(app, "/console/requeue", {"request_id": "r"}, **OURS).whole()
        assert (answer.status, answer.error["code"]) == (503, "queue_unavailable")
        await life.close()


async def test_actions_reach_the_services() -> None:
    queue = FakeQueue()
    queue.dead = [queue_pb2.DeadLetter(request_id="d-0")]
    async with console(queue, FakeScheduler()) as app:
        drained = await post(app, "/console/drain", {"worker": "w"}, **OURS).whole()
        assert (drained.status, drained.json()) == (200, {"worker": "w", "reservations": 2})
        assert (await post(app, "/console/undrain", {"worker": "w"}, **OURS).whole()).status == 200
        away = await post(app, "/console/undrain", {"worker": "away"}, **OURS).whole()
        assert (away.status, "not connected" in away.error["message"]) == (409, True)
        assert (await post(app, "/console/requeue", {"request_id": "d-0"}, **OURS).whole()).status == 200
        gone = await post(app, "/console/requeue", {"request_id": "d-1"}, **OURS).whole()
        assert (gone.status, gone.error["param"]) == (404, "request_id")


@pytest.mark.parametrize("body", [{}, {"worker": ""}, {"worker": 1}, {"worker": "w", "all": True}, {"name": "w"}, []])
async def test_actions_take_what_they_need_and_nothing_else(body: Any) -> None:
    async with console(FakeQueue(), FakeScheduler()) as app:
        assert (await post(app, "/console/drain", body, **OURS).whole()).status == 400


async def test_pages_of_others_are_refused() -> None:
    async with console(FakeQueue(), FakeScheduler(), console_hosts=["Fleet.example"]) as app:
        for headers in ({"host": HOST}, {"host": HOST, "origin": "http://evil.example"}):
            answer = await post(app, "/console/drain", {"worker": "w"}, **headers).whole()
            assert (answer.status, answer.error["code"]) == (403, "cross_origin")
        for path in ("/", "/console/state", "/console/console.js", "/console/requests/r"):
            answer = await look(app, path, "evil.example")
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        assert (await look(app, "/", "fleet.example:80")).status == 200
        assert (await Visit(app, "GET", "/console/drain", b"", {"host": HOST}).whole()).status == 405


async def test_the_page_and_its_headers() -> None:
    async with console(FakeQueue(), FakeScheduler()) as app:
        for path, kind in (
            ("/", "text/html"),
            ("/console/console.css", "text/css"),
            ("/console/console.js", "text/javascript"),
            ("/console/icon.svg", "image/svg+xml"),
            ("/console/state", "application/json"),
        ):
            answer = await look(app, path)
            assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, kind)
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_it_can_be_switched_off() -> None:
    queue = CountingQueue()
    async with console(queue, FakeScheduler(), console=False) as app:
        for path in ("/", "/console/state", "/console/console.js"):
            assert (await look(app, path)).status == 404
        assert (await post(app, "/console/drain", {"worker": "w"}, **OURS).whole()).status == 404
        assert queue.asked == 0
