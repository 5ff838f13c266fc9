"""Who has gone needs no answer: the request is cancelled as soon as the queue can be told, however late that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from penstock.credentials import AUTHORIZATION, pass_on
from penstock.errors import Unavailable
from penstock.request.v1 import request_pb2 as pb
from services.gateway.abandoned import Abandoned
from services.gateway.admission import Admission
from services.gateway.group import Group
from services.gateway.metrics import GatewayMetrics
from tests.support.fake_queue import FakeQueue, serving
from tests.unit.gateway.test_generation import PATIENCE_S, until

IDS = [f"r-{number}" for number in range(5)]


class Told(FakeQueue):
    """Remembers each call to cancel, by whom; some callers it does not know. It has no request of the name "gone"."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str]]] = []
        self.requests = [pb.Request(request_id=name) for name in IDS]

    async def Cancel(self, request: Any, context: Any) -> Any:
        metadata = dict(context.invocation_metadata())
        whose = metadata.get(AUTHORIZATION, "")
        self.calls.append((whose, [request.batch] if request.batch else list(request.request_ids.ids)))
        if whose == "Bearer revoked":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "there is no such key")
        return await super().Cancel(request, context)


class Counting(Client):
    """Counts the calls to cancel that came to nothing for as long as it is patient."""

    failed = 0

    async def cancel(self, *request_ids: str, batch: str | None = None) -> Any:
        try:
            return await super().cancel(*request_ids, batch=batch)
        except Unavailable:
            self.failed += 1
            raise


@asynccontextmanager
async def away() -> AsyncIterator[Counting]:
    """A client of a queue that is not there, and that `serving(queue, client.queue_address)` brings."""
    async with serving(FakeQueue()) as address:
        pass
    async with Counting(address, retry_for_s=0.02) as client:
        yield client


def cancels(metrics: GatewayMetrics) -> float:
    return metrics.registry.get_sample_value("penstock_gateway_cancels_total") or 0.0


async def test_who_leaves_while_the_queue_is_away_is_cancelled_when_it_is_back() -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    async with away() as client:
        admission = Admission(client, metrics)
        group = Group.of("", 3)
        for name in (*IDS[:4], "gone", group.name):
            admission.abandon(name)
        await until(lambda: client.failed >= 2)
        queue.requests.append(pb.Request(request_id="r-9", batch=group.batch))
        async with serving(queue, client._queue.address):
            await until(lambda: cancels(metrics) == 5)
            assert queue.calls == [("", [*IDS[:4], "gone"]), ("", [group.batch])], "many by one call"
            admission.abandon(IDS[4])
            await admission.settle(PATIENCE_S)
    assert queue.calls[2:] == [("", [IDS[4]])]
    assert cancels(metrics) == 6


async def test_each_is_cancelled_by_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())

    async def leave(abandoned: Abandoned, key: str, name: str) -> None:
        pass_on(f"Bearer {key}")
        abandoned.add(name)

    async with serving(queue) as address, Client(address, retry_for_s=0.1) as client:
        abandoned = Abandoned(client, metrics)
        leaving = [("revoked", IDS[0]), ("a", IDS[1]), ("b", IDS[2]), ("a", IDS[3])]
        await asyncio.gather(*(leave(abandoned, key, name) for key, name in leaving))
        await abandoned.settle()
    assert queue.calls == [("Bearer revoked", IDS[:1]), ("Bearer a", [IDS[1], IDS[3]]), ("Bearer b", [IDS[2]])]
    assert cancels(metrics) == 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{IDS[0]} goes on without its client"
    ]


async def test_of_too_many_the_oldest_go_on(caplog: pytest.LogCaptureFixture) -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    async with away() as client:
        abandoned = Abandoned(client, metrics, most=3)
        for name in IDS:
            abandoned.add(name)
        async with serving(queue, client._queue.address):
            await abandoned.settle()
    assert queue.calls == [("", IDS[2:])]
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [f"{name} goes on without its client" for name in IDS[:2]]


async def test_a_gateway_that_stops_waits_no_longer_for_it_than_its_patience(caplog: pytest.LogCaptureFixture) -> None:
    async with away() as client:
        admission = Admission(client, GatewayMetrics(CollectorRegistry()))
        for name in IDS:
            admission.abandon(name)
        await until(lambda: client.failed >= 1)
        failed = client.failed
        await admission.settle(PATIENCE_S)
        assert client.failed <= failed + 1
    assert len(caplog.records) == len(IDS)


async def test_a_gateway_that_stops_does_not_wait_for_a_queue_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(Told):
        async def Cancel(self, request: Any, context: Any) -> Any:
            await super().Cancel(request, context)
            await asyncio.Event().wait()

    queue = Hanging()
    async with serving(queue) as address, Client(address, retry_for_s=0.02) as client:
        admission = Admission(client, GatewayMetrics(CollectorRegistry()))
        admission.abandon(IDS[0])
        await until(lambda: bool(queue.calls))
        admission.abandon(IDS[1])
        await admission.settle(0.05)
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [f"{name} goes on without its client" for name in IDS[:2]]
