"""Spans of one request in the worker, under the names of the OpenTelemetry generative-AI conventions."""

from __future__ import annotations

from services.telemetry import Attribute, Telemetry
from services.worker.core.messages import Credits, Ending, EndingKind
from services.worker.engine import EngineShape
from services.worker.run import Run
from services.worker.wire import reported_model

SAMPLING_ATTRIBUTES = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}

NO_ERROR = frozenset({EndingKind.COMPLETED, EndingKind.CANCELLED, EndingKind.REJECTED})
"""Ends that are well, or of the client's making; the queue's spans tell them so too."""


def _fault(code: str, param: str) -> str:
    """Return what a span says of a failure. The message stays out: it may quote the client's grammar or schema."""
    return f"{code}: {param}" if param else code


def _code_of(ending: Ending) -> str:
    """Return the code of an end that was not asked for; empty if it was."""
    if ending.kind in {EndingKind.COMPLETED, EndingKind.CANCELLED}:
        return ""
    return ending.code or ending.kind.value


def _type(code: str) -> dict[str, Attribute]:
    return {"error.type": code} if code else {}


class RunSpans:
    """Exports the spans of finished steps; does nothing while telemetry is off."""

    def __init__(self, telemetry: Telemetry, shape: EngineShape, worker_id: str) -> None:
        """Export through `telemetry`."""
        self._telemetry = telemetry
        self._shape = shape
        self._worker_id = worker_id

    @property
    def enabled(self) -> bool:
        """Whether spans are exported."""
        return self._telemetry.enabled

    def claimed(self, request_id: str, traceparent: str, claimed_ns: int, answered_ns: int, refused: str = "") -> None:
        """Export `worker.claim`, child of the grant's span."""
        if self._telemetry.enabled:
            attributes: dict[str, Attribute] = {
                "penstock.request.id": request_id,
                "penstock.worker.id": self._worker_id,
            } | _type(refused)
            self._telemetry.record("worker.claim", traceparent, claimed_ns, answered_ns, attributes, refused)

    def tokenized(self, run: Run, code: str = "", param: str = "") -> None:
        """Export `worker.tokenize`; if the prompt was refused, with its code and the field that is at fault."""
        if self._telemetry.enabled:
            # Not as the generation says it, or whoever adds up a trace's tokens counts the prompt twice.
            attributes = self._common(run) | {"penstock.prompt_tokens": len(run.prompt_ids)} | _type(code)
            self._telemetry.record(
                "worker.tokenize",
                run.request.traceparent,
                run.delivered_ns,
                run.tokenized_ns,
                attributes,
                _fault(code, param),
            )

    def generated(self, run: Run, spent: Credits, end_ns: int) -> None:
        """Export the generation with its prefill and decode."""
        if not self._telemetry.enabled or not run.engine_started_ns:
            return
        operation = "chat" if run.request.WhichOneof("prompt") == "chat" else "text_completion"
        ending = run.ending or Ending(EndingKind.COMPLETED)
        attributes = self._common(run) | self._generation(run, operation, spent) | _type(_code_of(ending))
        parent = self._telemetry.record(
            f"{operation} {self._shape.model}",
            run.request.traceparent,
            run.engine_started_ns,
            end_ns,
            attributes,
            "" if ending.kind in NO_ERROR else _fault(_code_of(ending), ending.param),
        )
        if run.first_token_ns:
            common = self._common(run)
            self._telemetry.record("engine.prefill", parent, run.engine_started_ns, run.first_token_ns, common)
            self._telemetry.record("engine.decode", parent, run.first_token_ns, run.last_token_ns, common)

    def recorded(self, run: Run, now_ns: int) -> None:
        """Export `worker.complete`: from the completion's sending to the queue's answer."""
        if self._telemetry.enabled and run.completed_ns:
            self._telemetry.record(
                "worker.complete", run.request.traceparent, run.completed_ns, now_ns, self._common(run)
            )

    def _common(self, run: Run) -> dict[str, Attribute]:
        return {
            "penstock.request.id": run.lease.request_id,
            "penstock.attempt": run.lease.attempt,
            "penstock.worker.id": self._worker_id,
        }

    def _generation(self, run: Run, operation: str, spent: Credits) -> dict[str, Attribute]:
        sampling = run.request.sampling
        asked: dict[str, Attribute] = {
            SAMPLING_ATTRIBUTES[field.name]: value
            for field, value in sampling.ListFields()
            if field.name in SAMPLING_ATTRIBUTES
        }
        if finished := [reason for reason in run.output.finish_reasons if reason]:
            asked["gen_ai.response.finish_reasons"] = finished
        return asked | {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": self._shape.engine,
            "gen_ai.request.model": run.request.model or self._shape.model,
            "gen_ai.response.model": reported_model(self._shape, run.request.model),
            "gen_ai.usage.input_tokens": len(run.prompt_ids),
            "gen_ai.usage.output_tokens": run.output.tokens,
            "penstock.usage.cached_tokens": run.output.cached_tokens,
            "penstock.preemptions": run.output.preemptions,
            "penstock.blocks.booked": spent.booked_blocks,
            "penstock.blocks.settled": spent.settled_blocks,
        }
