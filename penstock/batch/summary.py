"""What a batch run says at its end: rates, outcomes, and what the credits did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2


class WorkerCounts(NamedTuple):
    """What one worker has counted since its process started."""

    usage_ns: float = 0.0
    busy_ns: int = 0
    preemptions: int = 0

    def plus(self, other: WorkerCounts) -> WorkerCounts:
        """Return the sum."""
        return WorkerCounts(
            self.usage_ns + other.usage_ns, self.busy_ns + other.busy_ns, self.preemptions + other.preemptions
        )

    def less(self, earlier: WorkerCounts) -> WorkerCounts:
        """Return the difference."""
        return WorkerCounts(
            self.usage_ns - earlier.usage_ns, self.busy_ns - earlier.busy_ns, self.preemptions - earlier.preemptions
        )


class WorkerLife(NamedTuple):
    """One worker as the scheduler told of it."""

    instance_id: str
    """Names its process; empty where the scheduler does not tell."""
    epoch: int
    counts: WorkerCounts | None
    """None until it has reported to this scheduler."""

    def has_restarted_since(self, earlier: WorkerLife) -> bool:
        """Return whether it is another process: by its name, else by its stream, which no two processes share."""
        if self.instance_id and earlier.instance_id:
            return self.instance_id != earlier.instance_id
        return self.epoch != earlier.epoch

    def since(self, earlier: WorkerLife | None) -> WorkerCounts:
        """Return what it did since `earlier`, and all its process did if that is another one, or None."""
        if self.counts is None:
            return WorkerCounts()
        if earlier is None or earlier.counts is None or self.has_restarted_since(earlier):
            return self.counts
        return self.counts.less(earlier.counts)


class LedgerCounts(NamedTuple):
    """What the scheduler has counted since its process started."""

    grants: int = 0
    tokenizer_refunds: int = 0
    tokenizer_refund_blocks: int = 0
    completion_refunds: int = 0
    completion_refund_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """What engines and ledger did in a run, as far as it was seen."""

    workers: WorkerCounts
    ledger: LedgerCounts
    workers_restarted: bool = False
    """A worker has another process than at the start: what its earlier ones did in the run is missing."""
    workers_gone: bool = False
    """A worker of the start is not there at the end: what it did in the run is missing."""
    scheduler_restarted: bool = False
    """The scheduler has another process than at the start: what its earlier ones did in the run is missing."""


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Counts of the fleet's engines and of the ledger at one moment, growing since their processes started."""

    workers: Mapping[str, WorkerLife] = field(default_factory=dict)
    """By name."""
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    instance_id: str = ""
    """Names the scheduler's process; empty where it does not tell."""

    def since(self, before: EngineTotals, grants_at_least: int = 0) -> Growth:
        """Return the growth since `before`; what has another process than then counts from that one's start.

        `grants_at_least` is how many grants there were for certain: a scheduler that counts fewer has restarted,
        also where its counters were 0 before.
        """
        grown, workers_restarted = WorkerCounts(), False
        for name, worker in self.workers.items():
            then = before.workers.get(name)
            grown = grown.plus(worker.since(then))
            workers_restarted |= then is not None and worker.has_restarted_since(then)
        scheduler_restarted = self._is_another_scheduler(before, grants_at_least)
        base = LedgerCounts() if scheduler_restarted else before.ledger
        return Growth(
            grown,
            LedgerCounts(*(now - then for now, then in zip(self.ledger, base, strict=True))),
            workers_restarted,
            not before.workers.keys() <= self.workers.keys(),
            scheduler_restarted,
        )

    def _is_another_scheduler(self, before: EngineTotals, grants_at_least: int) -> bool:
        if self.instance_id and before.instance_id:
            return self.instance_id != before.instance_id
        fewer = any(now < then for now, then in zip(self.ledger, before.ledger, strict=True))
        return fewer or self.ledger.grants - before.ledger.grants < grants_at_least


def totals_of(status: scheduler_pb2.StatusResponse) -> EngineTotals:
    """Return the totals of the fleet as the scheduler reports them."""
    return EngineTotals(
        {worker.worker_id: _life_of(worker) for worker in status.workers},
        LedgerCounts(
            status.grants,
            status.tokenizer_refunds,
            status.tokenizer_refund_blocks,
            status.completion_refunds,
            status.completion_refund_blocks,
        ),
        status.instance_id,
    )


def _life_of(worker: scheduler_pb2.WorkerStatus) -> WorkerLife:
    engine, counts = worker.engine, None
    if worker.HasField("engine"):
        counts = WorkerCounts(engine.kv_cache_usage_ns, engine.busy_ns, engine.preemptions)
    return WorkerLife(worker.instance_id, worker.epoch, counts)


@dataclass(slots=True)
class Tally:
    """Counts of the answers of this run, kept while they come in."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    bad_lines: int = 0
    answered_earlier: int = 0
    failed_earlier: int = 0
    """Of those, the ones whose answer is an error."""
    granted_here: int = 0
    """At least so many requests were both submitted and given to a worker in this run, so that each had a grant in it:
    all that a worker was given, but for as many as waited or ran when the run began."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, result: pb.Result, times: int = 1) -> None:
        """Count one result; with -1 for `times` take back one that was counted."""
        self.requests += times
        self.prompt_tokens += times * result.usage.prompt_tokens
        self.cached_tokens += times * result.usage.cached_tokens
        self.completion_tokens += times * result.usage.completion_tokens
        self.outcomes += Counter({pb.Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower(): times})


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run."""

    requests: int
    answered_earlier: int
    failed_earlier: int
    """Lines of `answered_earlier` whose answer is an error."""
    bad_lines: int
    outcomes: dict[str, int]
    elapsed_s: float
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    completion_tokens_per_s: float
    kv_usage: float | None
    """Share of the KV cache in use while the engines were busy. This and what follows is None if no scheduler said."""
    preemptions: int | None
    tokenizer_refunds: int | None
    tokenizer_refund_blocks: int | None
    completion_refunds: int | None
    completion_refund_blocks: int | None
    workers_restarted: bool | None
    """Whether a worker restarted in the run: in kv_usage and preemptions it counts from then on."""
    workers_gone: bool | None
    """Whether a worker is no longer there: kv_usage and preemptions are without it."""
    scheduler_restarted: bool | None
    """Whether the scheduler restarted in the run: the refunds count from then on."""

    def earlier(self, lines: int) -> str:
        """Return what is to be said of those of `lines` lines that were answered earlier, which must be some."""
        text = f"{self.answered_earlier} of {lines} lines were answered earlier"
        if not self.failed_earlier:
            return f"{text}; --fresh runs them again"
        if self.failed_earlier == self.answered_earlier == 1:
            return f"{text}, with an error; --retry-failed runs it again, --fresh all lines"
        return f"{text}, {self.failed_earlier} of them with an error; --retry-failed runs those again, --fresh all"

    def lines(self) -> Iterable[str]:
        """Yield the summary as text, one line an idea."""
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "none"
        bad = f", {self.bad_lines} wrong lines" if self.bad_lines else ""
        yield f"requests     {self.requests} answered in {self.elapsed_s:.1f} s ({ended}{bad})"
        yield f"throughput   {self.requests_per_s:.1f} requests/s, {self.completion_tokens_per_s:.0f} output tokens/s"
        cached = f"{self.cached_tokens} of them cached"
        yield f"tokens       {self.prompt_tokens} prompt ({cached}), {self.completion_tokens} generated"
        if self.kv_usage is None:
            yield "KV cache     not known, nor are refunds: the scheduler did not tell"
            return
        notes = "; a worker restarted, and counts from then on" if self.workers_restarted else ""
        notes += "; a worker is gone, and does not count" if self.workers_gone else ""
        yield f"KV cache     {self.kv_usage:.0%} used on average while busy, {self.preemptions} preemptions{notes}"
        since = " since the scheduler restarted" if self.scheduler_restarted else ""
        yield (
            f"refunds      {self.tokenizer_refunds} at the tokenizer ACK ({self.tokenizer_refund_blocks} blocks), "
            f"{self.completion_refunds} at the completion ACK ({self.completion_refund_blocks} blocks){since}"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the summary for a JSON file."""
        return asdict(self)


def summarize(tally: Tally, elapsed_s: float, engines: Growth | None) -> Summary:
    """Return the summary of a run of `elapsed_s` seconds in which the totals grew by `engines`, None if not known."""
    per_s = 1 / max(elapsed_s, 1e-9)
    return Summary(
        requests=tally.requests,
        answered_earlier=tally.answered_earlier,
        failed_earlier=tally.failed_earlier,
        bad_lines=tally.bad_lines,
        outcomes=dict(tally.outcomes),
        elapsed_s=elapsed_s,
        requests_per_s=tally.requests * per_s,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        completion_tokens=tally.completion_tokens,
        completion_tokens_per_s=tally.completion_tokens * per_s,
        kv_usage=None if engines is None else _usage(engines.workers),
        preemptions=None if engines is None else engines.workers.preemptions,
        tokenizer_refunds=None if engines is None else engines.ledger.tokenizer_refunds,
        tokenizer_refund_blocks=None if engines is None else engines.ledger.tokenizer_refund_blocks,
        completion_refunds=None if engines is None else engines.ledger.completion_refunds,
        completion_refund_blocks=None if engines is None else engines.ledger.completion_refund_blocks,
        workers_restarted=None if engines is None else engines.workers_restarted,
        workers_gone=None if engines is None else engines.workers_gone,
        scheduler_restarted=None if engines is None else engines.scheduler_restarted,
    )


def _usage(counts: WorkerCounts) -> float:
    """Return the mean share in use while busy; blocks that are held while nothing runs are no more than all of them."""
    return min(counts.usage_ns / counts.busy_ns, 1.0) if counts.busy_ns > 0 else 0.0
