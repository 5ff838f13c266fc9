"""Which answers of the gateway are errors in a trace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from penstock.openai.bodies import COMPLETIONS_URL
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway.admission import Admission
from services.gateway.generation import Generation, Parts
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from tests.support.asgi import post
from tests.support.fake_queue import FakeQueue, serving
from tests.support.spans import Kept, is_error, told

TEXT = {"model": "tiny", "prompt": "the river"}
STATUS, CAUSE = "http.response.status_code", "error.type"


async def fleet() -> scheduler_pb2.StatusResponse:
    return scheduler_pb2.StatusResponse(workers=[scheduler_pb2.WorkerStatus(worker_id="w", model="tiny")])


@asynccontextmanager
async def generation(address: str, kept: Kept) -> AsyncIterator[Generation]:
    """Yield what answers completions."""
    async with Client(address, retry_for_s=0.1) as client:
        metrics = GatewayMetrics(CollectorRegistry())
        parts = Parts(
            client, Admission(client, metrics), Intake(5), Served(fleet, lambda: 0.0), metrics, kept.telemetry
        )
        yield Generation(COMPLETIONS_URL, parts)


def ended(outcome: pb.Outcome.ValueType, code: str) -> Callable[[pb.Request], pb.Result]:
    return lambda _: pb.Result(outcome=outcome, error=pb.RequestError(code=code, message="of 'my secret'"))


@pytest.mark.parametrize(
    ("outcome", "code", "status", "cause"),
    [
        (pb.OUTCOME_DEAD, "worker_lost", 500, "worker_lost"),
        (pb.OUTCOME_EXPIRED, "deadline_exceeded", 408, None),
        (pb.OUTCOME_REJECTED, "context_length_exceeded", 400, None),
    ],
)
async def test_an_answer_is_an_error_from_500_on(
    outcome: pb.Outcome.ValueType, code: str, status: int, cause: str | None
) -> None:
    queue, kept = FakeQueue(), Kept()
    queue.answer = ended(outcome, code)
    async with serving(queue) as address, generation(address, kept) as app:
        answer = await post(app, COMPLETIONS_URL, TEXT).whole()
    assert answer.status == status
    span = kept.one("gateway.request")
    assert told(span, STATUS, CAUSE) == {STATUS: status, **({CAUSE: cause} if cause else {})}
    assert is_error(span) is (cause is not None)
    assert "secret" not in span.to_json()


async def test_an_answer_of_a_queue_that_is_away_is_an_error() -> None:
    kept = Kept()
    async with serving(FakeQueue()) as address:
        pass
    async with generation(address, kept) as app:
        answer = await post(app, COMPLETIONS_URL, TEXT).whole()
    assert answer.status == 503
    span = kept.one("gateway.request")
    assert told(span, STATUS, CAUSE) == {STATUS: 503, CAUSE: "queue_unavailable"}
    assert is_error(span)


async def test_a_stream_that_breaks_after_its_200_is_an_error() -> None:
    queue, kept = FakeQueue(), Kept()
    queue.answer = ended(pb.OUTCOME_DEAD, "engine_dead")
    queue.tokens = [pb.TokenDelta(request_id="r-0", attempt=1, token_ids=[1], text="the")]
    async with serving(queue) as address, generation(address, kept) as app:
        answer = await post(app, COMPLETIONS_URL, {**TEXT, "stream": True}).whole()
    assert answer.status == 200
    assert told(kept.one("gateway.request"), STATUS, CAUSE) == {STATUS: 500, CAUSE: "engine_dead"}
