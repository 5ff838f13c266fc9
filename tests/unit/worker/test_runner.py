"""A run whose text no message can carry ends by itself: the worker's loop, and every other run, goes on."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from penstock.exits import EX_SOFTWARE
from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2 as s
from services.clock import SystemClock
from services.telemetry import Telemetry
from services.worker import wire
from services.worker.core import messages as m
from services.worker.core.session import Session
from services.worker.engine import (
    ChoiceStep,
    EngineRequest,
    EngineShape,
    EngineStep,
    PromptSpec,
    Rendered,
    RequestRefusedError,
)
from services.worker.gen_ai import RunSpans
from services.worker.metrics import WorkerMetrics
from services.worker.run import Run
from services.worker.runner import Identity, Runner
from services.worker.service import END_S, Service, sizes_of
from services.worker.settings import WorkerSettings
from services.worker.tokenizer import answer_to, failed
from tests.support.fake_peers import until

SHAPE = EngineShape("test", 64, 16, 512, 8, 0, "tiny", ("alias", "poet"), adapters=("poet",))

HALF = "half"
"""A prompt that the engine answers with half a surrogate pair."""

HELD = "held"
"""A prompt that the tokenizer does not come to."""

DEADLY = "deadly"
"""A prompt that its tokenizer dies of."""

REFUSED = "refused"
"""A prompt whose refusal quotes half a surrogate pair."""


class Engine:
    """Says the prompt, in two steps."""

    shape = SHAPE

    def __init__(self) -> None:
        self.models: list[str] = []
        self.goes_on = asyncio.Event()
        """Whether it makes its second step."""
        self.goes_on.set()
        self.end_s = -1.0
        """How long it was given to end, if it was closed."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        self.models.append(request.model)
        yield EngineStep([ChoiceStep(0, (1,), "".join(map(chr, request.prompt_ids)))], False)
        await asyncio.sleep(0)
        await self.goes_on.wait()
        yield EngineStep([ChoiceStep(0, (2,), "!", finish_reason="stop")], True)

    def tell_at(self, run_id: str, tokens: int) -> None: ...

    def start(self, *_: object) -> None: ...

    async def abort(self, run_id: str) -> None: ...

    async def close(self, within_s: float) -> None:
        self.end_s = within_s


class NeverAborts(Engine):
    """Runs on for ever, and fails to be stopped: when the generation is left, as vLLM's does, or when it is asked."""

    def __init__(self, at_leaving: bool) -> None:
        super().__init__()
        self._at_leaving = at_leaving

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        yield EngineStep([ChoiceStep(0, (1,), "on")], False)
        try:
            await asyncio.Event().wait()
        finally:
            if self._at_leaving:
                raise RuntimeError("a defect")

    async def abort(self, run_id: str) -> None:
        if not self._at_leaving:
            raise RuntimeError("a defect")


class Hangs(Engine):
    """Takes every run, lives, and makes no step."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        await asyncio.Event().wait()
        yield EngineStep([], True)


class Renderer:
    """A token for each character."""

    def render(self, spec: PromptSpec) -> Rendered:
        if spec.text == REFUSED:
            raise RequestRefusedError("invalid_prompt", "cannot read \ud800", "prompt")
        return Rendered(array("I", [0xD800] if spec.text == HALF else [ord(c) for c in spec.text or ""]))


class Tokenizer:
    """Renders at once, but not one prompt, and fails at another."""

    def __init__(self) -> None:
        self.runner: Runner
        self.asked: list[str] = []
        self.forgotten: list[str] = []

    async def start(self, *_: object) -> None: ...

    async def loaded(self) -> None: ...

    async def close(self) -> None: ...

    def render(self, name: str, spec: PromptSpec) -> None:
        self.asked.append(name)
        if spec.text != HELD:
            answer = failed("signal 9") if spec.text == DEADLY else answer_to(Renderer(), name, spec)
            self.runner.tokenized(name, answer)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


class Scheduler:
    """Hears nothing."""

    def open(self, message: s.WorkerToScheduler) -> None: ...

    def send(self, message: s.WorkerToScheduler | bytes) -> None: ...


class Queue:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[q.WorkerToQueue] = []

    def open(self, message: q.WorkerToQueue) -> None: ...

    def send(self, message: q.WorkerToQueue | bytes) -> None:
        self.heard.append(q.WorkerToQueue.FromString(message) if isinstance(message, bytes) else message)

    def send_later(self, make: Callable[[], bytes]) -> None:
        self.send(make())

    def completion(self, name: str) -> q.Complete | None:
        return next((h.complete for h in self.heard if h.complete.lease.request_id == name), None)

    def said(self, name: str) -> str:
        return "".join(h.tokens.text for h in self.heard if h.tokens.request_id == name)


class Bench:
    """A runner between its peers."""

    def __init__(self, telemetry: Telemetry | None = None, engine: Engine | None = None) -> None:
        self.registry = CollectorRegistry()
        self.queue = Queue()
        self.session = session = Session(sizes_of(SHAPE, 64))
        self.tokenizer = tokenizer = Tokenizer()
        spans = RunSpans(telemetry or Telemetry(None), SHAPE, "w1")
        metrics = WorkerMetrics(session, 64, self.registry)
        who = Identity("w1", "i1", 64)
        self.engine = engine or Engine()
        works: Any = self.engine
        self.runner = Runner(who, session, works, tokenizer, SystemClock(), metrics, spans)
        tokenizer.runner = self.runner
        self.runner.connect(Scheduler(), self.queue)
        for message in (m.SchedulerReached(), m.SchedulerUp(1, 0), m.QueueReached(), m.QueueUp(10**15, 8)):
            self.runner.post(message)

    async def complete(self, name: str, text: str, watched: bool = False, model: str = "") -> q.Complete:
        """Run a request; return how its attempt ended."""
        await self.deliver(name, text, watched, model)
        return await until(lambda: self.queue.completion(name), f"the completion of {name}", 10)

    async def deliver(self, name: str, text: str, watched: bool = False, model: str = "") -> q.LeaseRef:
        """Grant a request and hand it over; return its lease."""
        self.runner.grant_arrived(s.Grant(request_id=name, channel="batch", booked_blocks=9, settles=True, attempt=1))
        await until(lambda: any(h.claim.request_id == name for h in self.queue.heard), f"the claim of {name}")
        lease = q.LeaseRef(request_id=name, attempt=1, fencing_token=1)
        request = pb.Request(request_id=name, text=text, model=model, sampling=pb.SamplingParams(max_tokens=4))
        self.runner.deliver_arrived(q.Deliver(lease=lease, request=request, watched=watched))
        return lease

    @property
    def unwritable(self) -> float | None:
        return self.registry.get_sample_value("penstock_worker_unwritable_results_total")


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    yield bench
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop  # an error of its own would come out here


@pytest.mark.parametrize("watched", [False, True])
async def test_a_result_that_cannot_be_written_fails_its_own_attempt(
    bench: Bench, watched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failed = await bench.complete("r1", HALF, watched)
    assert failed.failure.code == "internal_error"
    assert bench.unwritable == 1
    assert any(r.exc_info and "r1" in r.getMessage() for r in caplog.records)
    well = await bench.complete("r2", "well", watched)
    assert [choice.text for choice in well.result.choices] == ["well!"]
    assert bench.unwritable == 1
    assert bench.queue.said("r2") == ("well!" if watched else "")


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
async def test_a_run_whose_tokens_cannot_be_written_is_watched_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is its watcher told at its end, when they could be written no better."""
    asked: list[str] = []

    def refuse(run: Run) -> list[bytes]:
        asked.append(run.run_id)
        raise ValueError("half a pair")

    monkeypatch.setattr(Run, "token_messages", refuse)
    bench.engine.goes_on.clear()
    await bench.deliver("r1", "well", watched=True)
    await until(lambda: asked, "its tokens to be asked for")
    await until(lambda: not bench.session._held.by_run["r1.1"].watched, "the session to hear of it")
    bench.engine.goes_on.set()
    await until(lambda: bench.queue.completion("r1"), "its end", 10)
    assert asked == ["r1.1"]


async def test_a_refusal_that_quotes_half_a_surrogate_pair_reaches_the_client(bench: Bench) -> None:
    refused = await bench.complete("r1", REFUSED)
    assert refused.result.outcome == pb.OUTCOME_REJECTED
    assert "\\ud800" in refused.result.error.message
    assert (await bench.complete("r2", "well")).result.outcome == pb.OUTCOME_COMPLETED


async def test_a_span_tells_the_code_and_the_field_of_a_refusal_and_nothing_it_quotes() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    bench = Bench(Telemetry(provider))
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    refused = await bench.complete("r1", REFUSED)
    loop.cancel()
    assert "cannot read" in refused.result.error.message
    (span,) = (span for span in exporter.get_finished_spans() if span.name == "worker.tokenize")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "invalid_prompt: prompt")


@pytest.mark.parametrize(("asked", "said"), [("", "tiny"), ("tiny", "tiny"), ("alias", "tiny"), ("poet", "poet")])
async def test_a_model_answers_by_its_first_name_and_an_adapter_by_its_own(bench: Bench, asked: str, said: str) -> None:
    completion = await bench.complete("r1", "well", model=asked)
    assert completion.result.model == said
    assert bench.engine.models == [asked]


async def test_a_prompt_that_its_tokenizer_dies_of_fails_its_attempt_and_no_other(bench: Bench) -> None:
    complete = await bench.complete("r1", DEADLY)
    assert (complete.failure.code, complete.failure.message) == ("tokenizer_error", "signal 9")
    assert (await bench.complete("r2", "well")).result.outcome == pb.OUTCOME_COMPLETED


async def test_a_prompt_that_still_waits_leaves_the_tokenizers_line_with_its_run(bench: Bench) -> None:
    lease = await bench.deliver("r1", HELD)
    await until(lambda: bench.tokenizer.asked, "the prompt")
    bench.runner.post(m.CancelRun(wire.lease_of(lease), m.CancelCause.CLIENT))
    await until(lambda: bench.queue.completion("r1"), "its end")
    assert (await bench.complete("r2", "well")).result.outcome == pb.OUTCOME_COMPLETED
    assert bench.tokenizer.forgotten == ["r1.1"]


@pytest.mark.parametrize("at_leaving", [False, True])
async def test_an_engine_that_cannot_abort_a_run_ends_the_worker(at_leaving: bool) -> None:
    """What the engine still holds of it nobody knows, so none of the credits can be granted again."""
    bench = Bench(engine=NeverAborts(at_leaving))
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    lease = await bench.deliver("r1", "well", watched=True)
    await until(lambda: bench.queue.said("r1"), "its first token")
    bench.runner.post(m.CancelRun(wire.lease_of(lease), m.CancelCause.CLIENT))
    completion = await until(lambda: bench.queue.completion("r1"), "its end", 10)
    assert completion.result.outcome == pb.OUTCOME_CANCELLED
    assert bench.runner.dead_reason == "the engine cannot abort a run: RuntimeError: a defect"
    assert bench.session.held_blocks == 0
    loop.cancel()


class Serving:
    """A whole service with an engine and a run in it, between peers that are not there."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, **stated: float) -> None:
        metrics = partial(WorkerMetrics, registry=CollectorRegistry())
        monkeypatch.setattr("services.worker.service.WorkerMetrics", metrics)
        settings = WorkerSettings(
            listen="127.0.0.1:0",
            queue_address="127.0.0.1:1",
            scheduler_address="127.0.0.1:1",
            **stated,  # type: ignore[arg-type]
        )
        tokenizer = Tokenizer()
        service = Service(settings, engine, tokenizer, Telemetry(None))  # type: ignore[arg-type]
        tokenizer.runner = self.runner = service.runner
        self.queue = Queue()
        self.runner.connect(Scheduler(), self.queue)
        self.lease = q.LeaseRef(request_id="r1", attempt=1, fencing_token=1)
        self.stop = asyncio.Event()
        self.status = asyncio.get_running_loop().create_task(service.run(self.stop, lambda _: None))

    async def deliver(self) -> None:
        """Have r1 in the engine."""
        runner, queue = self.runner, self.queue
        for message in (m.SchedulerReached(), m.SchedulerUp(1, 0), m.QueueReached(), m.QueueUp(10**15, 8)):
            runner.post(message)
        runner.grant_arrived(s.Grant(request_id="r1", channel="batch", booked_blocks=9, settles=True, attempt=1))
        request = pb.Request(request_id="r1", text="well", sampling=pb.SamplingParams(max_tokens=4))
        await until(lambda: any(h.claim.request_id == "r1" for h in queue.heard), "the claim")
        runner.deliver_arrived(q.Deliver(lease=self.lease, request=request, watched=True))

    async def ended(self) -> q.Complete:
        """Return how r1 ended, once the worker has: with the status of an engine that has died."""
        completion = await until(lambda: self.queue.completion("r1"), "its end", 10)
        self.runner.post(m.Recorded(wire.lease_of(self.lease), True))
        async with asyncio.timeout(30):
            assert await self.status == EX_SOFTWARE
        return completion


async def test_a_service_whose_engine_cannot_abort_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine says that it is dead here: it is the runner that finds it out."""
    serving = Serving(NeverAborts(False), monkeypatch, engine_stall_s=0)
    await serving.deliver()
    await until(lambda: serving.queue.said("r1"), "the first token")
    serving.runner.post(m.CancelRun(wire.lease_of(serving.lease), m.CancelCause.CLIENT))
    await serving.ended()


async def test_a_service_whose_engine_hangs_ends_and_the_attempt_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Hangs()
    serving = Serving(engine, monkeypatch, engine_stall_s=0.05)
    await serving.deliver()
    failure = (await serving.ended()).failure
    assert failure.code == "engine_dead"
    assert failure.message == "the engine has made no step for 0.05 s, with something in it"
    assert engine.end_s == 0, "it would not hear that it is to end"


async def test_an_engine_ends_within_what_its_worker_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it hangs nobody has found out yet."""
    engine, grace_s = Hangs(), 0.01
    serving = Serving(engine, monkeypatch, shutdown_grace_s=grace_s)
    await serving.deliver()
    serving.stop.set()
    async with asyncio.timeout(30):
        assert await serving.status == 0
    assert [heard.give_back.leases[0].request_id for heard in serving.queue.heard if heard.HasField("give_back")]
    assert 0 <= engine.end_s < grace_s + END_S


async def test_what_is_kept_of_a_grant_for_its_spans_goes_with_it() -> None:
    """A grant that was not claimed ends with the scheduler's stream."""
    bench = Bench(Telemetry(TracerProvider()))
    bench.runner.post(m.QueueDown())
    bench.runner.grant_arrived(s.Grant(request_id="r1", channel="batch", booked_blocks=9, settles=True, attempt=1))
    loop = asyncio.get_running_loop().create_task(bench.runner.run())
    await until(lambda: bench.runner._grants, "the grant")
    for message in (m.SchedulerDown(), m.SchedulerReached()):
        bench.runner.post(message)
    await until(lambda: not bench.runner._grants, "the end of the grant")
    loop.cancel()


async def test_a_worker_whose_part_dies_or_is_cancelled_by_nobody_says_so(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(WorkerSettings(model="tiny"), Engine(), Tokenizer(), Telemetry(None))  # type: ignore[arg-type]

    async def die(error: BaseException) -> None:
        await asyncio.sleep(0)
        raise error

    for name, error in (("runner", RuntimeError("a defect")), ("queue-link", asyncio.CancelledError())):
        for asked in (True, False):
            task = asyncio.get_running_loop().create_task(die(error), name=name)
            async with asyncio.timeout(30):
                assert await service._wind_down(asked, [task]) == EX_SOFTWARE
            assert f"{name} ended" in caplog.text
            caplog.clear()


async def test_a_worker_says_how_many_requests_have_ended_without_the_queue_knowing_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.service.FLUSH_S", 0.0)
    monkeypatch.setattr("services.worker.service.WorkerMetrics", partial(WorkerMetrics, registry=CollectorRegistry()))
    settings = WorkerSettings(model="tiny", shutdown_grace_s=0.001)
    service = Service(settings, Engine(), Tokenizer(), Telemetry(None))  # type: ignore[arg-type]
    service.runner, service._session = bench.runner, bench.session
    await bench.complete("r1", "well")
    runs = asyncio.create_task(asyncio.Event().wait())
    assert await service._wind_down(True, [runs]) == 0  # type: ignore[list-item]
    assert "1 requests have ended here and the queue has not recorded it" in caplog.text
    runs.cancel()
