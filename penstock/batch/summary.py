"""What a batch run says at its end: rates, outcomes, and what the credits did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2

OF_THE_WORKERS = ("usage_ns", "busy_ns", "preemptions")
OF_THE_SCHEDULER = (
    "grants",
    "tokenizer_refunds",
    "tokenizer_refund_blocks",
    "completion_refunds",
    "completion_refund_blocks",
)


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Counts of the fleet's engines and of the ledger, growing since their services started."""

    usage_ns: float = 0.0
    busy_ns: int = 0
    preemptions: int = 0
    tokenizer_refunds: int = 0
    tokenizer_refund_blocks: int = 0
    completion_refunds: int = 0
    completion_refund_blocks: int = 0
    grants: int = 0
    workers_restarted: bool = False
    """In a growth: a worker's counters began again at 0, so that the growth is not the whole."""
    scheduler_restarted: bool = False
    """In a growth: the scheduler's counters began again at 0, so that the growth is not the whole."""

    def since(self, before: EngineTotals, grants_at_least: int = 0) -> EngineTotals:
        """Return the growth since `before`; a service that restarted meanwhile counts from its start.

        `grants_at_least` is how many grants there were for certain: a scheduler that counts fewer has restarted,
        also where its counters were 0 before.
        """
        workers = self._began_again(before, OF_THE_WORKERS)
        scheduler = self._began_again(before, OF_THE_SCHEDULER) or self.grants - before.grants < grants_at_least
        grown: dict[str, Any] = {}
        for names, restarted in ((OF_THE_WORKERS, workers), (OF_THE_SCHEDULER, scheduler)):
            for name in names:
                grown[name] = getattr(self, name) - (0 if restarted else getattr(before, name))
        return EngineTotals(**grown, workers_restarted=workers, scheduler_restarted=scheduler)

    def _began_again(self, before: EngineTotals, names: Sequence[str]) -> bool:
        return any(getattr(self, name) < getattr(before, name) for name in names)


def totals_of(status: scheduler_pb2.StatusResponse) -> EngineTotals:
    """Return the totals of the fleet as the scheduler reports them."""
    engines = [worker.engine for worker in status.workers]
    return EngineTotals(
        usage_ns=sum(engine.kv_cache_usage_ns for engine in engines),
        busy_ns=sum(engine.busy_ns for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
        tokenizer_refunds=status.tokenizer_refunds,
        tokenizer_refund_blocks=status.tokenizer_refund_blocks,
        completion_refunds=status.completion_refunds,
        completion_refund_blocks=status.completion_refund_blocks,
        grants=status.grants,
    )


@dataclass(slots=True)
class Tally:
    """Counts of the answers of this run, kept while they come in."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    bad_lines: int = 0
    answered_earlier: int = 0
    granted_here: int = 0
    """Requests that were both submitted and given to a worker in this run, so that each had a grant in it."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, result: pb.Result) -> None:
        """Count one result."""
        self.requests += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.completion_tokens += result.usage.completion_tokens
        self.outcomes[pb.Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower()] += 1


@dataclass(frozen=True, slots=True)
class Summary:
    """One finished run."""

    requests: int
    answered_earlier: int
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
    """Whether a worker restarted in the run: kv_usage and preemptions count from then on."""
    scheduler_restarted: bool | None
    """Whether the scheduler restarted in the run: the refunds count from then on."""

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
        since = " since a worker restarted" if self.workers_restarted else ""
        yield f"KV cache     {self.kv_usage:.0%} used on average while busy, {self.preemptions} preemptions{since}"
        since = " since the scheduler restarted" if self.scheduler_restarted else ""
        yield (
            f"refunds      {self.tokenizer_refunds} at the tokenizer ACK ({self.tokenizer_refund_blocks} blocks), "
            f"{self.completion_refunds} at the completion ACK ({self.completion_refund_blocks} blocks){since}"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the summary for a JSON file."""
        return asdict(self)


def summarize(tally: Tally, elapsed_s: float, engines: EngineTotals | None) -> Summary:
    """Return the summary of a run of `elapsed_s` seconds in which the totals grew by `engines`, None if not known."""
    per_s = 1 / max(elapsed_s, 1e-9)
    return Summary(
        requests=tally.requests,
        answered_earlier=tally.answered_earlier,
        bad_lines=tally.bad_lines,
        outcomes=dict(tally.outcomes),
        elapsed_s=elapsed_s,
        requests_per_s=tally.requests * per_s,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        completion_tokens=tally.completion_tokens,
        completion_tokens_per_s=tally.completion_tokens * per_s,
        kv_usage=None if engines is None else engines.usage_ns / max(engines.busy_ns, 1),
        preemptions=None if engines is None else engines.preemptions,
        tokenizer_refunds=None if engines is None else engines.tokenizer_refunds,
        tokenizer_refund_blocks=None if engines is None else engines.tokenizer_refund_blocks,
        completion_refunds=None if engines is None else engines.completion_refunds,
        completion_refund_blocks=None if engines is None else engines.completion_refund_blocks,
        workers_restarted=None if engines is None else engines.workers_restarted,
        scheduler_restarted=None if engines is None else engines.scheduler_restarted,
    )
