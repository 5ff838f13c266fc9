"""One trace per request, over a real OTLP receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import penstock as public
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import Fleet
from tests.support.otlp import OtlpReceiver
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"

LIFE = ["queue.persist", "queue.wait", "scheduler.grant", "worker.claim", "worker.tokenize", "engine.prefill",
        "engine.decode", "scheduler.credits", "worker.complete", "queue.complete"]  # fmt: skip


async def ask(fleet: Fleet) -> public.Result:
    """Submit one request under a client's trace and return its result."""
    async with public.Client(fleet.queue.address) as client:
        return await client.generate(
            prompt="the river and the gate", max_tokens=8, temperature=0.0, ignore_eos=True,
            traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        )  # fmt: skip


@pytest.mark.parametrize("engine", ["simulated", pytest.param("vLLM", marks=[pytest.mark.long, pytest.mark.vllm])])
def test_a_request_is_one_trace(make_fleet: Callable[..., Fleet], request: pytest.FixtureRequest, engine: str) -> None:
    flags = [*SIMULATED_FLAGS, "--block-size", "32"]
    with OtlpReceiver() as receiver:
        fleet = make_fleet(environment=receiver.environment)
        fleet.add_worker("w1", request.getfixturevalue("engine_flags") if engine == "vLLM" else flags)
        result = asyncio.run(ask(fleet))

        def names() -> set[str]:
            return {span.name for span in receiver.of_trace(CLIENT_TRACE)}

        wait_for(lambda: names() >= set(LIFE), f"every span of the request; have {names()}")
        spans = {span.name: span for span in receiver.of_trace(CLIENT_TRACE)}
        known = {span.span_id for span in spans.values()} | {CLIENT_SPAN}
        assert all(span.parent_id in known for span in spans.values()), "no span hangs loose"
        assert all(span.end_ns >= span.start_ns for span in spans.values())
        assert all(span.attributes["penstock.request.id"] == result.request_id for span in spans.values())
        assert {span.service for span in spans.values()} == {"penstock-queue", "penstock-scheduler", "penstock-worker"}

        order = ["queue.persist", "scheduler.grant", "worker.tokenize", "engine.prefill", "engine.decode"]
        starts = [spans[name].start_ns for name in order]
        assert starts == sorted(starts)

        inference = spans["text_completion tiny"].attributes
        assert inference["gen_ai.operation.name"] == "text_completion"
        assert inference["gen_ai.request.model"] == "tiny"
        assert inference["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
        assert inference["gen_ai.usage.output_tokens"] == 8
        assert inference["gen_ai.response.finish_reasons"] == ["length"]
        credit = spans["scheduler.credits"].attributes
        assert credit["penstock.blocks.booked"] >= credit["penstock.blocks.settled"] == 1
        assert credit["penstock.blocks.released"] == credit["penstock.blocks.settled"]


def test_without_a_client_trace_the_queue_starts_one(make_fleet: Callable[..., Fleet]) -> None:
    with OtlpReceiver() as receiver:
        fleet = make_fleet(environment=receiver.environment)
        fleet.add_worker("w1", ["--engine", "simulated"])

        async def ask_plainly() -> str:
            async with public.Client(fleet.queue.address) as client:
                return (await client.generate(prompt="hello", max_tokens=2)).request_id

        request_id = asyncio.run(ask_plainly())

        def spans_of_request() -> list[str]:
            return [s.trace_id for s in receiver.spans if s.attributes.get("penstock.request.id") == request_id]

        wait_for(lambda: len(spans_of_request()) >= len(LIFE), "the spans")
        assert len(set(spans_of_request())) == 1


def test_what_runs_while_the_scheduler_is_restarted_has_the_span_of_its_credits(
    make_fleet: Callable[..., Fleet],
) -> None:
    with OtlpReceiver() as receiver:
        fleet = make_fleet(environment=receiver.environment)
        fleet.add_worker("w1", ["--engine", "simulated", "--profile", "cpu-small"])

        def causes() -> list[object]:
            return [s.attributes["penstock.release.cause"] for s in receiver.spans if s.name == "scheduler.credits"]

        with public.SyncClient(fleet.queue.address) as client:
            client.submit(prompt="hello", max_tokens=100_000, ignore_eos=True)
            wait_for(lambda: "scheduler.grant" in {span.name for span in receiver.spans}, "the grant")
            assert not causes(), "it runs"
            assert fleet.scheduler.stop() == 0
            wait_for(lambda: bool(causes()), "the span of its credits")
        assert causes() == ["scheduler_stopped"]
