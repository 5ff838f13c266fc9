"""What became of the promises: every line once, the right text, every credit home, nobody left behind."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from penstock.batch.reader import InputFile
from penstock.batch.runner import batch_name
from tests.chaos.gauges import Gauges
from tests.chaos.stack import Stack, output_of
from tests.support.batch_lines import text_of

HOME_S = 60.0
"""Longest that the last credits may take to come home: every lease and grace period of the stack, several times."""

EXCUSED = {"worker": {70}, "queue": {69}, "client": {69}}
"""Exit statuses a process may end with by itself: its engine was lost; its disk was full at the start; the queue
could not be reached for as long as it was told to wait. All are started again."""


@dataclass
class Verdict:
    """What was counted."""

    requests: int
    lost: int = 0
    duplicated: int = 0
    other_text: int = 0
    credit_violations: int = 0
    orphans: int = 0
    useful_tokens: int = 0
    """Of the results: prompts and outputs."""
    repeated_tokens: int = 0
    """At most so many were computed again, by the attempts that were lost."""
    computed_tokens: int = 0
    """What the workers counted themselves, over all their lives, up to the last reading before each kill."""
    handed_back: int = 0
    """Requests that a worker gave back, which counts as no attempt."""
    attempts: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Everything that breaks a promise, in words."""

    @property
    def recompute_pct(self) -> float:
        """Tokens computed again, in percent of all tokens computed."""
        total = self.useful_tokens + self.repeated_tokens
        return round(100 * self.repeated_tokens / total, 2) if total else 0.0

    @property
    def measured_pct(self) -> float:
        """Tokens computed beyond those of the results, in percent of all computed, as the workers counted."""
        return round(100 * (1 - self.useful_tokens / self.computed_tokens), 2) if self.computed_tokens else 0.0

    def note(self, count: int, text: str) -> int:
        """Note a broken promise if `count` is not 0; return `count`."""
        if count:
            self.problems.append(f"{count} × {text}")
        return count


def judge_outputs(verdict: Verdict, stack: Stack, expected: dict[str, str]) -> None:
    """Check every output line: once, in order, without an error, with the text of a fault-free run."""
    seen: Counter[str] = Counter()
    for sources in stack.plan.lanes:
        for source in sources:
            asked = [line["custom_id"] for line in _read(source)]
            answered = _read(output_of(source))
            names = [line["custom_id"] for line in answered]
            seen.update(names)
            if names != asked:
                verdict.problems.append(f"{output_of(source).name}: not every line once and in order")
            for line in answered:
                _judge_line(verdict, line, expected)
    missing = expected.keys() - seen.keys()
    verdict.lost += verdict.note(len(missing), f"no answer, such as {sorted(missing)[:3]}")
    twice = [name for name, count in seen.items() if count > 1]
    verdict.duplicated += verdict.note(len(twice), f"answered twice, such as {twice[:3]}")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(row) for row in file]


def _judge_line(verdict: Verdict, line: dict[str, Any], expected: dict[str, str]) -> None:
    name = line["custom_id"]
    if line["error"] is not None:
        verdict.lost += verdict.note(1, f"{name} ended with {line['error']['code']}: {line['error']['message']}")
    elif text_of(line) != expected[name]:
        verdict.other_text += verdict.note(1, f"{name} says {text_of(line)!r}, without faults {expected[name]!r}")


async def judge_results(verdict: Verdict, stack: Stack, gauges: Gauges) -> None:
    """Check what the queue itself holds, by a new client: one result for each line; and count the work done."""
    async with penstock.Client(stack.services["queue"].address) as client:
        for sources in stack.plan.lanes:
            for source in sources:
                lines = InputFile(source)
                results: Counter[str] = Counter()
                with suppress(penstock.NotFound):  # all are lost
                    async for result in client.watch(batch=batch_name(output_of(source), lines, "")):
                        results[result.client_reference] += 1
                        _count(verdict, result)
                verdict.lost += verdict.note(len(lines) - len(results), f"no result in the queue, of {source.name}")
                twice = sum(count - 1 for count in results.values())
                verdict.duplicated += verdict.note(twice, f"second result in the queue, of {source.name}")
                lines.close()
    _count_work(verdict, gauges)


def _count(verdict: Verdict, result: penstock.Result) -> None:
    tokens = result.usage.prompt_tokens + result.usage.completion_tokens
    verdict.useful_tokens += tokens
    verdict.attempts[result.attempts] += 1
    # At temperature 0 an attempt that was lost had the same length ahead of it, so it computed at most as much.
    verdict.repeated_tokens += (result.attempts - 1 + result.preemptions) * tokens


def _count_work(verdict: Verdict, gauges: Gauges) -> None:
    verdict.handed_back = gauges.total("penstock_queue_requeues_total", cause="give_back")
    # What had been computed of these is not known: at most a whole request each.
    verdict.repeated_tokens += int(verdict.handed_back * verdict.useful_tokens / max(verdict.attempts.total(), 1))
    verdict.computed_tokens = sum(
        gauges.total(f"penstock_worker_{kind}_tokens_total") for kind in ("prompt", "generation")
    )


async def judge_credits(verdict: Verdict, stack: Stack, gauges: Gauges) -> None:
    """Wait for every credit to come home, and count what any audit has seen in any life of any service."""
    try:
        async with asyncio.timeout(HOME_S):
            while away := await _away(stack, gauges):
                await asyncio.sleep(0.2)
    except TimeoutError:
        verdict.credit_violations += verdict.note(len(away), f"not as it should be after {HOME_S:.0f} s: {away}")
    moments = gauges.imbalances
    verdict.credit_violations += verdict.note(len(moments), f"ledger that did not add up, such as {moments[:1]}")
    names = {name for reading in gauges.last.values() for name, _ in reading if name.endswith("_violations_total")}
    for name in sorted(names):
        verdict.credit_violations += verdict.note(gauges.total(name), name)
    reported = stack.services["scheduler"].log_path.read_text(errors="replace").count("ledger of worker ")
    verdict.credit_violations += verdict.note(reported, "violation in the scheduler's log, over all its lives")


async def _away(stack: Stack, gauges: Gauges) -> list[str]:
    """Return what is not yet as it must be when nothing is left to do."""
    await gauges.read_all()
    scheduler = "penstock_scheduler_"
    found = {
        "blocks held": gauges.value("scheduler", f"{scheduler}held_blocks"),
        "reservations": gauges.value("scheduler", f"{scheduler}reservations"),
        "blocks of drift": gauges.value("scheduler", f"{scheduler}drift_blocks"),
        "blocks not free": gauges.value("scheduler", f"{scheduler}capacity_blocks")
        - gauges.value("scheduler", f"{scheduler}free_blocks"),
        "workers not connected": stack.plan.workers - gauges.value("scheduler", f"{scheduler}worker_connected"),
        "requests waiting": gauges.value("queue", "penstock_queue_ready_requests"),
        "requests leased": gauges.value("queue", "penstock_queue_leased_requests"),
        "dead letters": gauges.value("queue", "penstock_queue_dead_requests"),
        "completions not recorded": sum(
            gauges.value(name, "penstock_worker_unrecorded_completions") for name in stack.services
        ),
    }
    return [f"{value:.0f} {what}" for what, value in found.items() if value]


def judge_processes(verdict: Verdict, stack: Stack, stopped_wrong: Sequence[str], orphans: Sequence[str]) -> None:
    """Check how every process ended, and that none is left."""
    verdict.orphans += len(orphans)
    verdict.problems += [*orphans, *stopped_wrong]
    for process in stack.processes:
        verdict.problems += process.wrong_exits
        excused = EXCUSED.get(process.name.split("-", maxsplit=1)[0], set())
        verdict.problems += [
            f"{process.name} ended by itself with status {status}"
            for status in process.unasked
            if status not in excused
        ]
