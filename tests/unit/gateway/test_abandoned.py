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
from penstock.errors import NobodyAnswers, Unavailable
from penstock.openai.bodies import COMPLETIONS_URL
from penstock.request.v1 import request_pb2 as pb
from services.gateway.abandoned import Abandoned, drawn_key
from services.gateway.admission import Admission, understand
from services.gateway.extras import Extras
from services.gateway.group import Group
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.rpc.strict import abort_with_code
from tests.support.fake_queue import FakeQueue, serving
from tests.support.ports import free_port
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
    async with Counting(f"127.0.0.1:{free_port()}", retry_for_s=0.02) as client:
        yield client


def cancels(metrics: GatewayMetrics) -> float:
    return metrics.registry.get_sample_value("penstock_gateway_cancels_total") or 0.0


def uncancelled(metrics: GatewayMetrics) -> float:
    return metrics.registry.get_sample_value("penstock_gateway_uncancelled_total") or 0.0


def first_of_too_many(name: str) -> str:
    return f"{name} goes on without its client, and more may"


async def test_who_leaves_while_the_queue_is_away_is_cancelled_when_it_is_back() -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    async with away() as client:
        admission = Admission(client, metrics)
        group, keys = Group.of("", 3), [drawn_key(), drawn_key()]
        for name in (*IDS[:2], "gone", keys[0], IDS[2], keys[1], IDS[3], group.name):
            admission.abandon(name)
        await until(lambda: client.failed >= 2)
        queue.requests.append(pb.Request(request_id="r-9", batch=group.batch))
        queue.requests.append(pb.Request(request_id="r-10"))
        queue.by_key[keys[1]] = "r-10"
        async with serving(queue, client._queue.address):
            await until(lambda: cancels(metrics) == 6)
            told = [[*IDS[:2], "gone", *IDS[2:4]], ["r-10"], [group.batch]]
            assert queue.calls == [("", names) for names in told], "many by one call"
            admission.abandon(IDS[4])
            await admission.settle(PATIENCE_S)
    assert queue.calls[3:] == [("", [IDS[4]])]
    assert cancels(metrics) == 7


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
        for outage in (1, 2):
            for name in IDS:
                abandoned.add(name)
            async with serving(queue, client._queue.address):
                await until(lambda: cancels(metrics) == 3 * outage)  # noqa: B023
    assert queue.calls == [("", IDS[2:])] * 2
    assert uncancelled(metrics) == 2 * 2
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [first_of_too_many(IDS[0]), "2 requests went on without their clients"] * 2, "no line for each"


async def test_who_has_many_pushes_out_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    async with away() as client:
        abandoned = Abandoned(client, metrics, most=4)
        for whose, name in (("one", IDS[0]), ("many", IDS[1]), ("many", IDS[2]), ("many", IDS[3]), ("one", IDS[4])):
            pass_on(f"Bearer {whose}")
            abandoned.add(name)
        async with serving(queue, client._queue.address):
            await abandoned.settle()
    assert queue.calls == [("Bearer one", [IDS[0], IDS[4]]), ("Bearer many", IDS[2:4])]
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [first_of_too_many(IDS[1]), "1 requests went on without their clients"]
    assert uncancelled(metrics) == 1


async def test_who_has_many_keeps_nobody_else_waiting_for_a_turn() -> None:
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    keys = [drawn_key() for _ in range(3)]
    queue.by_key.update(zip(keys, IDS, strict=False))
    async with serving(queue) as address, Client(address, retry_for_s=0.1) as client:
        abandoned = Abandoned(client, metrics)
        for whose, name in (("many", keys[0]), ("many", keys[1]), ("one", keys[2])):
            pass_on(f"Bearer {whose}")
            abandoned.add(name)
        await abandoned.settle()
    assert queue.calls == [("Bearer many", IDS[:1]), ("Bearer one", IDS[2:3]), ("Bearer many", IDS[1:2])]


class Dying(Told):
    """Is gone whatever it is asked, once that has come."""

    async def Submit(self, request_iterator: Any, context: Any) -> Any:
        async for frame in request_iterator:
            if frame.HasField("batch"):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        yield

    async def _gone(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    SubmitUnary = Get = Cancel = _gone


async def submit(admission: Admission) -> str:
    """Submit something without a key; return its name, raise what kept it from being submitted."""
    asked = understand(COMPLETIONS_URL, {"model": "m", "prompt": "p"}, Extras(), 0)
    with Intake(1.0).holding() as held:
        return (await admission.submit(asked, held.pass_on())).name


async def test_what_cannot_be_submitted_pushes_out_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the queue is away that may be very much, of which the first alone may have come to it."""
    keys = [f"gateway-{number:032x}" for number in range(3)]
    monkeypatch.setattr("services.gateway.admission.drawn_key", iter(keys).__next__)
    queue, metrics = Told(), GatewayMetrics(CollectorRegistry())
    queue.by_key[keys[0]] = IDS[4]
    async with away() as client:
        admission = Admission(client, metrics, most=2)
        for name in IDS[:2]:
            admission.abandon(name)
        async with serving(Dying(), client._queue.address):
            for _ in keys:
                with pytest.raises(Unavailable):
                    await submit(admission)
        async with serving(queue, client._queue.address):
            await until(lambda: cancels(metrics) == 3)
            await admission.settle(PATIENCE_S)
    assert sorted(queue.calls) == [("", IDS[:2]), ("", IDS[4:])]
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == [first_of_too_many(keys[2]), "1 requests went on without their clients"]


class Looked(Client):
    """Counts the lookups."""

    lookups = 0

    async def wire_get(self, *args: Any, **more: Any) -> Any:
        self.lookups += 1
        return await super().wire_get(*args, **more)


async def test_what_was_never_sent_or_was_refused_is_not_looked_up(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Told):
        async def SubmitUnary(self, request: Any, context: Any) -> Any:
            response = await super().SubmitUnary(request, context)
            full, error = grpc.StatusCode.RESOURCE_EXHAUSTED, response.acks[0].error
            await abort_with_code(context, full, error.message, error.code)

    queue, metrics = Full(), GatewayMetrics(CollectorRegistry())
    queue.refuse_submits = 2 * 3
    async with serving(queue) as address, Looked(address, retry_for_s=0.1) as client:
        admission = Admission(client, metrics, most=1)
        for _ in range(3):
            with pytest.raises(Unavailable, match="nearly full"):
                await submit(admission)
        await admission.settle(PATIENCE_S)
        assert (queue.refuse_submits, client.lookups) == (0, 0)
    async with Looked(address, retry_for_s=0.1) as client:
        admission = Admission(client, metrics, most=1)
        for _ in range(3):
            with pytest.raises(NobodyAnswers):
                await submit(admission)
        await admission.settle(PATIENCE_S)
        assert client.lookups == 0
    assert (uncancelled(metrics), caplog.records) == (0, [])


async def test_what_came_before_nobody_answered_is_looked_up() -> None:
    """The last attempt alone does not tell: the one before may have been stored."""

    class Last(Told):
        """Stores a request over a stream, and is then no more."""

        async def Submit(self, request_iterator: Any, context: Any) -> Any:
            async for frame in request_iterator:
                for tagged in frame.batch.requests:
                    await self._accept(tagged.request, tagged.tag)
                    stopped.set()
                    await asyncio.Event().wait()
            yield

    queue, metrics, stopped = Last(), GatewayMetrics(CollectorRegistry()), asyncio.Event()
    queue.paused = True
    async with away() as client:
        admission = Admission(client, metrics)
        async with serving(queue, client._queue.address):
            submitting = asyncio.create_task(submit(admission))
            await stopped.wait()
        with pytest.raises(NobodyAnswers):
            await submitting
        async with serving(queue, client._queue.address):
            await until(lambda: cancels(metrics) == 1)
    assert queue.calls == [("", ["r-5"])]


async def test_what_waits_at_the_queue_to_be_stored_is_cancelled_too() -> None:
    """It is not found as yet, though it came; counts are answered behind it."""

    class Late(Told):
        late = ""

        async def Stats(self, request: Any, context: Any) -> Any:
            self.by_key[self.late] = IDS[0]
            return await super().Stats(request, context)

    queue, metrics = Late(), GatewayMetrics(CollectorRegistry())
    queue.late = drawn_key()
    async with serving(queue) as address, Client(address, retry_for_s=0.1) as client:
        abandoned = Abandoned(client, metrics)
        abandoned.add(queue.late)
        await abandoned.settle()
    assert queue.calls == [("", IDS[:1])]
    assert (cancels(metrics), uncancelled(metrics)) == (1, 0)


class Deaf(Told):
    """Stores what is submitted, and is gone before it says so."""

    stores = True

    async def Submit(self, request_iterator: Any, context: Any) -> Any:
        async for frame in request_iterator:
            for tagged in frame.batch.requests:
                if self.stores:
                    await self._accept(tagged.request, tagged.tag)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        yield

    async def SubmitUnary(self, request: Any, context: Any) -> Any:
        if self.stores:
            await self._accept(request.requests[0], 0)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("key", ["", "mine"])
@pytest.mark.parametrize("leaves", [True, False])
async def test_what_may_be_durable_and_has_no_name_is_cancelled(stores: bool, key: str, leaves: bool) -> None:
    queue, metrics = Deaf(), GatewayMetrics(CollectorRegistry())
    queue.stores, queue.paused = stores, True
    async with serving(queue) as address, Client(address, retry_for_s=0.1) as client:
        admission = Admission(client, metrics)
        for number in range(2):
            extras = Extras(idempotency_key=key and f"{key} {number}", keep=bool(key))
            asked = understand(COMPLETIONS_URL, {"model": "m", "prompt": "p"}, extras, 0)
            with Intake(1.0).holding() as held:
                submitting = asyncio.create_task(admission.submit(asked, held.pass_on()))
                await asyncio.sleep(0)
                if leaves:
                    submitting.cancel()
                with pytest.raises(asyncio.CancelledError if leaves else Unavailable):
                    await submitting
        await admission.settle(PATIENCE_S)
    assert len(queue.by_key) == (2 if stores else 0)
    assert sorted(queue.calls) == ([("", ["r-5"]), ("", ["r-6"])] if stores and not key else [])
    assert cancels(metrics) == len(queue.calls)
    assert uncancelled(metrics) == 0


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
