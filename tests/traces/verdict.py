"""What the trace of a request must be: which spans, below which, in which order, with which attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tests.support.otlp import ReceivedSpan

GENERATION = "text_completion tiny"
"""The span that the worker names after operation and model."""

ROOTS = ("penstock.submit", "gateway.request")

COMMON = frozenset({"penstock.request.id"})
OF_A_LEASE = COMMON | {"penstock.channel", "penstock.attempt"}
OF_A_RUN = COMMON | {"penstock.attempt", "penstock.worker.id"}
BOOKED = OF_A_LEASE | {"penstock.worker.id", "penstock.blocks.booked"}

ATTRIBUTES: dict[str, frozenset[str]] = {
    "penstock.submit": COMMON,
    "gateway.request": COMMON | {"http.request.method", "url.path", "http.response.status_code"},
    "queue.persist": COMMON | {"penstock.channel", "penstock.tenant"},
    "queue.wait": OF_A_LEASE,
    "queue.lease": OF_A_LEASE | {"penstock.worker.id", "penstock.lease.end"},
    "queue.complete": COMMON | {"penstock.outcome", "penstock.attempt"},
    "scheduler.grant": BOOKED,
    "scheduler.credits": BOOKED | {"penstock.blocks.released", "penstock.release.cause"},
    "worker.claim": COMMON | {"penstock.worker.id"},
    "worker.tokenize": OF_A_RUN | {"penstock.prompt_tokens"},
    GENERATION: OF_A_RUN
    | {"gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.output_tokens", "penstock.blocks.settled"},
    "engine.prefill": OF_A_RUN,
    "engine.decode": OF_A_RUN,
    "worker.complete": OF_A_RUN,
}
"""Every span that docs/observability.md lists, with the attributes that it must have."""

PARENTS = {
    **dict.fromkeys(("queue.persist", "queue.wait", "queue.lease", "queue.complete"), ROOTS),
    **dict.fromkeys(("scheduler.grant", "scheduler.credits"), ROOTS),
    "worker.claim": ("scheduler.grant",),
    **dict.fromkeys(("worker.tokenize", GENERATION, "worker.complete"), ROOTS),
    **dict.fromkeys(("engine.prefill", "engine.decode"), (GENERATION,)),
}

STOOD_READY = "penstock.grant.standing"
"""Of a `scheduler.grant` that was there before its request, which is delivered without having been claimed."""

OF_THE_WORKER = ("worker.tokenize", GENERATION, "engine.prefill", "engine.decode", "worker.complete")

SAME_MOMENT_NS = 2_000_000
"""Processes read the system's clock each for itself, and it may be set back a little in between."""

UNSENT_NS = 3_000_000_000
"""A killed process loses what its exporter had not sent: 0.2 s of waiting, and the export itself on a busy machine."""

ON_THE_WAY_NS = 500_000_000
"""A claim that a killed worker had sent is still read and answered. Its next life takes longer than this to start."""


class Kill(NamedTuple):
    """A worker was killed."""

    worker_id: str
    at_ns: int


class Sent(NamedTuple):
    """A request that was asked for, and the span that it is to begin with."""

    request_id: str
    root: str


@dataclass
class Tally:
    """What was found. `faults` must be empty."""

    traces: int = 0
    whole: int = 0
    """Traces in which no span of the attempt that answered is missing."""
    struck: int = 0
    """Traces whose answering worker was killed before it had sent all its spans; the queue's tell of the attempt."""
    retried: int = 0
    lost_attempts: int = 0
    spans: int = 0
    faults: list[str] = field(default_factory=list)


class Trace:
    """The spans of one request."""

    def __init__(self, sent: Sent, spans: Sequence[ReceivedSpan], kills: Iterable[Kill]) -> None:
        """Look at `spans`, all that name the request."""
        self._sent = sent
        self._spans = spans
        self._kills = kills
        self._by_id = {span.span_id: span for span in spans}
        self._by_name: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in spans:
            self._by_name[span.name].append(span)
        self.lost = 0
        """Attempts that ended without a result."""
        self.struck = False

    def faults(self) -> Iterator[str]:
        """Yield what is wrong."""
        if len({span.trace_id for span in self._spans}) != 1:
            yield f"{len({span.trace_id for span in self._spans})} traces"
        for name in (self._sent.root, "queue.persist", "queue.complete"):
            if len(self._by_name[name]) != 1:
                yield f"{len(self._by_name[name])} spans {name}"
                return
        for span in self._spans:
            yield from self._span_faults(span)
        (complete,) = self._by_name["queue.complete"]
        if complete.attributes["penstock.outcome"] != "completed":
            yield f"outcome {complete.attributes['penstock.outcome']}"
        attempts = int(complete.attributes["penstock.attempt"])
        before_ns = 0
        for attempt in range(1, attempts + 1):
            leases = self._of("queue.lease", attempt)
            if len(leases) != 1:
                yield f"attempt {attempt}: {len(leases)} spans queue.lease"
                return
            if leases[0].start_ns + SAME_MOMENT_NS < before_ns:
                yield f"attempt {attempt} began before the one before it ended"
            before_ns = leases[0].end_ns
            yield from (f"attempt {attempt}: {fault}" for fault in self._attempt_faults(attempt, leases[0], attempts))

    def _of(self, name: str, attempt: int) -> list[ReceivedSpan]:
        return [span for span in self._by_name[name] if span.attributes.get("penstock.attempt") == attempt]

    def _span_faults(self, span: ReceivedSpan) -> Iterator[str]:
        """What every span must be, of whichever attempt."""
        if span.name not in ATTRIBUTES:
            yield f"unknown span {span.name}"
            return
        if missing := ATTRIBUTES[span.name] - span.attributes.keys() - self._never_known(span):
            yield f"{span.name} has no {sorted(missing)}"
        if span.end_ns < span.start_ns:
            yield f"{span.name} ends before it starts"
        if span.name in ROOTS:
            return
        parent = self._by_id.get(span.parent_id)
        if parent is None and self._is_cut(span):
            return
        if parent is None or parent.name not in PARENTS[span.name]:
            yield f"{span.name} is below {parent.name if parent else 'nothing'}"

    def _never_known(self, span: ReceivedSpan) -> frozenset[str]:
        """Attributes that a span of a killed worker's attempt cannot have."""
        return frozenset({"penstock.blocks.settled"}) if self._was_killed(span) else frozenset()

    def _is_cut(self, span: ReceivedSpan) -> bool:
        """Whether a span's parent may be lost with the worker that had not sent it."""
        return span.name.startswith("engine.") and self._was_killed(span)

    def _was_killed(self, span: ReceivedSpan) -> bool:
        worker = span.attributes.get("penstock.worker.id")
        return any(
            kill.worker_id == worker and span.start_ns - ON_THE_WAY_NS <= kill.at_ns <= span.end_ns + UNSENT_NS
            for kill in self._kills
        )

    def _attempt_faults(self, attempt: int, lease: ReceivedSpan, attempts: int) -> Iterator[str]:
        grants, holdings = self._of("scheduler.grant", attempt), self._of("scheduler.credits", attempt)
        if not self._of("queue.wait", attempt):
            yield "no queue.wait"
        killed = self._was_killed(lease)
        # A worker that is killed before it has told of what it ran on a standing grant takes that along.
        untold = not grants and killed and attempt < attempts
        if len(grants) != len(holdings) or not (grants or untold):
            yield f"{len(grants)} grants, {len(holdings)} times credits"
        end = lease.attributes["penstock.lease.end"]
        if lease.is_error is not (attempt < attempts):
            yield f"its lease ended by {end}, which is {'an' if lease.is_error else 'no'} error"
        if attempt < attempts:
            self.lost += 1
            if not killed or end not in ("worker_lost", "lease_expired"):
                yield f"its lease ended by {end}, and its worker was {'killed' if killed else 'well'}"
            return
        if end != "complete":
            yield f"its lease ended by {end}"
        yield from self._answer_faults(attempt, lease, killed)

    def _answer_faults(self, attempt: int, lease: ReceivedSpan, killed: bool) -> Iterator[str]:
        """The attempt that answered: every span of its worker, in order; or the queue tells what a kill has cost."""
        spans = {name: self._of(name, attempt) for name in OF_THE_WORKER}
        worker = lease.attributes["penstock.worker.id"]
        if not any(STOOD_READY in grant.attributes for grant in self._of("scheduler.grant", attempt)):
            spans["worker.claim"] = [
                s for s in self._by_name["worker.claim"] if s.attributes["penstock.worker.id"] == worker
            ]
        missing = sorted(name for name, found in spans.items() if not found)
        if missing and not killed:
            yield f"no {', '.join(missing)}, and its worker lived on"
        self.struck = bool(missing)
        if not {"first_token", "last_token"} <= lease.events.keys():
            yield "queue.lease does not tell when tokens came"
        if not missing:
            yield from self._order_faults({name: found[-1] for name, found in spans.items()}, lease)

    def _order_faults(self, spans: Mapping[str, ReceivedSpan], lease: ReceivedSpan) -> Iterator[str]:
        (persist,), (complete,) = self._by_name["queue.persist"], self._by_name["queue.complete"]
        asked, delivered = [], []
        if claim := spans.get("worker.claim"):
            # One whose grant is unknown has been found to hang loose.
            asked = [("granted", self._by_id.get(claim.parent_id, persist).end_ns), ("claimed", claim.start_ns)]
            delivered = [("delivered", claim.end_ns)]
        moments = [
            ("persisted", persist.start_ns), *asked, ("leased", lease.start_ns), *delivered,
            ("tokenized", spans["worker.tokenize"].end_ns), ("engine started", spans["engine.prefill"].start_ns),
            ("first token", spans["engine.prefill"].end_ns), ("decoding", spans["engine.decode"].start_ns),
            ("last token", spans["engine.decode"].end_ns), ("sent", spans["worker.complete"].start_ns),
            ("taken", complete.start_ns), ("recorded", spans["worker.complete"].end_ns),
        ]  # fmt: skip
        for (earlier, before_ns), (later, after_ns) in pairwise(moments):
            if before_ns > after_ns + SAME_MOMENT_NS:
                yield f"{later} {(before_ns - after_ns) / 1e6:.1f} ms before {earlier}"
        if lease.events.get("first_token") != spans["engine.prefill"].end_ns:
            yield "queue.lease and engine.prefill tell different times of the first token"


def judge(sent: Sequence[Sent], spans: Iterable[ReceivedSpan], kills: Sequence[Kill]) -> Tally:
    """Return what the spans say of the requests that were asked for."""
    tally = Tally()
    by_request: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
    for span in spans:
        tally.spans += 1
        by_request[str(span.attributes.get("penstock.request.id", ""))].append(span)
    for stray in by_request.keys() - {request.request_id for request in sent}:
        tally.faults.append(f"{len(by_request[stray])} spans of {stray or 'no request'}: {by_request[stray][0].name}")
    for request in sent:
        trace = Trace(request, by_request[request.request_id], kills)
        found = [f"{request.request_id}: {fault}" for fault in trace.faults()]
        tally.faults += found
        tally.traces += not found
        tally.whole += not found and not trace.struck
        tally.struck += trace.struck
        tally.lost_attempts += trace.lost
        tally.retried += trace.lost > 0
    return tally
