"""What a batch run says at its end: rates, outcomes, and what the credits did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2


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

    def since(self, before: EngineTotals) -> EngineTotals:
        """Return the growth since `before`; a service that restarted meanwhile counts from its start."""
        grown = {
            name: value - earlier if value >= (earlier := getattr(before, name)) else value
            for name, value in asdict(self).items()
        }
        return EngineTotals(**grown)


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
    kv_usage: float
    preemptions: int
    tokenizer_refunds: int
    tokenizer_refund_blocks: int
    completion_refunds: int
    completion_refund_blocks: int

    def lines(self) -> Iterable[str]:
        """Yield the summary as text, one line an idea."""
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "none"
        bad = f", {self.bad_lines} wrong lines" if self.bad_lines else ""
        yield f"requests     {self.requests} answered in {self.elapsed_s:.1f} s ({ended}{bad})"
        yield f"throughput   {self.requests_per_s:.1f} requests/s, {self.completion_tokens_per_s:.0f} output tokens/s"
        cached = f"{self.cached_tokens} of them cached"
        yield f"tokens       {self.prompt_tokens} prompt ({cached}), {self.completion_tokens} generated"
        yield f"KV cache     {self.kv_usage:.0%} used on average while busy, {self.preemptions} preemptions"
        yield (
            f"refunds      {self.tokenizer_refunds} at the tokenizer ACK ({self.tokenizer_refund_blocks} blocks), "
            f"{self.completion_refunds} at the completion ACK ({self.completion_refund_blocks} blocks)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the summary for a JSON file."""
        return asdict(self)


def summarize(tally: Tally, elapsed_s: float, engines: EngineTotals) -> Summary:
    """Return the summary of a run of `elapsed_s` seconds during which the engines' totals grew by `engines`."""
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
        kv_usage=engines.usage_ns / engines.busy_ns if engines.busy_ns else 0.0,
        preemptions=engines.preemptions,
        tokenizer_refunds=engines.tokenizer_refunds,
        tokenizer_refund_blocks=engines.tokenizer_refund_blocks,
        completion_refunds=engines.completion_refunds,
        completion_refund_blocks=engines.completion_refund_blocks,
    )
