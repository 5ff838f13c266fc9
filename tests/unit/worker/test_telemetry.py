"""Spans of one request, and the numbers a scrape gives."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from penstock.request.v1 import request_pb2 as pb
from services.core.drain import Drain
from services.telemetry import Telemetry
from services.worker.core import messages as m
from services.worker.core.messages import Credits, Ending, EndingKind, Lease
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.engine import ChoiceStep, EngineShape, EngineStep
from services.worker.gen_ai import RunSpans
from services.worker.metrics import COUNTERS, GAUGES, WorkerMetrics
from services.worker.outputs import RunOutput
from services.worker.run import Run

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SHAPE = EngineShape("vllm", 64, 16, 512, 8, 0, "tiny")
MS = 1_000_000


def exported(do: str) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = RunSpans(Telemetry(provider), SHAPE, "w1")
    request = pb.Request(traceparent=PARENT, sampling=pb.SamplingParams(temperature=0.0, max_tokens=5))
    if do == "chat":
        request.chat.messages_json = "[]"
    run = Run(Lease("r1", 2, 9), "r1.9", request, 0, 10 * MS)
    run.prompt_ids, run.tokenized_ns, run.engine_started_ns = [1, 2, 3], 11 * MS, 12 * MS
    run.first_token_ns, run.last_token_ns, run.completed_ns = 15 * MS, 30 * MS, 31 * MS
    run.output.take(EngineStep([ChoiceStep(0, (4, 5), "x", finish_reason="length")], True))
    run.ending = Ending(EndingKind.COMPLETED)
    if do in ENDINGS:
        run.ending = ENDINGS[do]
        run.output = RunOutput(False)
        run.output.take(EngineStep([ChoiceStep(0, (4, 5), "x")], False))
    if do == "failure":
        run.ending = Ending(EndingKind.FAILED, "engine_error", "no such rule: 'secret'", "structured_outputs.grammar")
    spans.claimed("r1", PARENT, 8 * MS, 10 * MS)
    spans.tokenized(run, *(("invalid_grammar", "structured_outputs.grammar") if do == "failure" else ()))
    spans.generated(run, Credits(0, 30, 2, 0, 1), 30 * MS)
    spans.recorded(run, 33 * MS)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_each_step_is_a_span_of_the_requests_trace() -> None:
    spans = exported("text")
    assert set(spans) == {
        "worker.claim", "worker.tokenize", "text_completion tiny", "engine.prefill", "engine.decode", "worker.complete",
    }  # fmt: skip
    for span in spans.values():
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert span.attributes is not None
        assert span.attributes["penstock.request.id"] == "r1"
    prefill, decode = spans["engine.prefill"], spans["engine.decode"]
    assert (prefill.start_time, prefill.end_time) == (12 * MS, 15 * MS)
    assert (decode.start_time, decode.end_time) == (15 * MS, 30 * MS)
    generation = spans["text_completion tiny"].context
    assert generation is not None
    for child in (prefill, decode):
        assert child.parent is not None
        assert child.parent.span_id == generation.span_id


def test_the_generation_carries_the_conventions_attributes() -> None:
    attributes = exported("chat")["chat tiny"].attributes
    assert attributes is not None
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.temperature"] == 0.0
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["penstock.blocks.booked"], attributes["penstock.blocks.settled"]) == (30, 2)


def test_a_failed_attempt_is_an_error_span_without_what_the_client_wrote() -> None:
    spans = exported("failure")
    assert spans["worker.tokenize"].status.description == "invalid_grammar: structured_outputs.grammar"
    assert spans["text_completion tiny"].status.description == "engine_error: structured_outputs.grammar"


ENDINGS = {
    "hang-up": Ending(EndingKind.CANCELLED, "cancelled"),
    "deadline": Ending(EndingKind.EXPIRED, "deadline_exceeded"),
    "refusal": Ending(EndingKind.REJECTED, "context_length_exceeded"),
    "nothing said": Ending(EndingKind.FAILED),
}


@pytest.mark.parametrize(
    ("do", "is_error", "cause"),
    [
        ("text", False, None),
        ("failure", True, "engine_error"),
        ("hang-up", False, None),
        ("deadline", True, "deadline_exceeded"),
        ("refusal", False, "context_length_exceeded"),
        ("nothing said", True, "failed"),
    ],
)
def test_an_end_that_is_an_error_is_told_as_the_queue_tells_it(do: str, is_error: bool, cause: str | None) -> None:
    span = exported(do)["text_completion tiny"]
    assert span.attributes is not None
    assert (span.status.status_code is StatusCode.ERROR, span.attributes.get("error.type")) == (is_error, cause)
    assert ("gen_ai.response.finish_reasons" in span.attributes) == (do not in ENDINGS), "none is not an empty one"


def test_a_prompt_is_counted_once_in_a_trace_and_a_refused_one_says_by_which_code() -> None:
    counts = [
        span.attributes and span.attributes.get("gen_ai.usage.input_tokens") for span in exported("text").values()
    ]
    assert [count for count in counts if count is not None] == [3]
    tokenize = exported("failure")["worker.tokenize"].attributes
    assert tokenize is not None
    assert (tokenize["penstock.prompt_tokens"], tokenize["error.type"]) == (3, "invalid_grammar")


def test_a_scrape_reads_the_session() -> None:
    registry = CollectorRegistry()
    session = Session(Sizes(60, 64, 16, 512))
    WorkerMetrics(session, 60, registry)
    session.step(m.SchedulerReached(), 0)
    session.step(m.SchedulerUp(1, 0), 0)
    session.step(m.Granted("r1", "batch", 7, True, 1), 0)
    session.step(m.EngineReported(50, 2, 1, 4, 0, 14 / 64), 0)
    session.step(m.DrainHeard(Drain(1, True)), 0)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"penstock_worker_{name}", labels)

    assert sample("capacity_blocks") == 60
    assert sample("preemptions_total") == 4
    assert sample("grants_total") == 1
    assert sample("releases_total", cause="unclaimed") == 1
    assert sample("requests", state="granted") == 0
    for name in GAUGES:
        assert sample(name) is not None, name
    for name in COUNTERS:
        assert sample(f"{name}_total") is not None, name
