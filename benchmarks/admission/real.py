"""Admission policies on real vLLM: the same requests pushed into it and granted by Penstock, in alternating rounds.

Usage: python -m benchmarks.admission.real [--workload kv-bound ...] [--policies all] [--requests 600] [--rounds 3]
       [--warm-up 600] [--model tiny] [--scale cpu] [--out build/bench]

Every policy has an engine of its own with the same flags (`push`, `old-pull`, `live-pull` and `aimd` share one); idle
ones stay up. A warm-up comes first, then rounds in which every policy runs once, in an order that changes so that none
always follows the same other. All figures come from the engine's scheduler (recorder.py), requests/s from the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.admission import workloads
from benchmarks.admission.lines import batch_lines
from benchmarks.admission.report import Outcome, print_table
from benchmarks.admission.sides import PENSTOCK, PUSHED, Penstock, Pushed, Side
from benchmarks.admission.trace import Trace
from benchmarks.admission.workloads import SCALES, Shape, Workload
from benchmarks.models import MODELS, Model, make_model
from benchmarks.options import count, folder, push_first


def engine_flags(at: Path, model: Model, shape: Shape, prefix_caching: bool) -> list[str]:
    """Return the engine arguments of every policy for the model made at `at`."""
    flags = {
        "--model": str(at),
        "--served-model-name": "tiny",
        "--dtype": model.device.dtype,
        "--max-model-len": str(shape.window_tokens),
        "--max-num-seqs": str(shape.max_num_seqs),
        "--max-num-batched-tokens": str(shape.max_num_batched_tokens),
        "--logits-processors": model.device.logits_processor,
        "--scheduler-cls": model.device.recorder,
    }
    caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
    kv_flags = model.kv_flags(shape.blocks, shape.block_size)
    return [*model.device.flags, *model.flags, *kv_flags, caching, *(part for pair in flags.items() for part in pair)]


async def start(
    stack: AsyncExitStack, directory: Path, policies: list[str], flags: list[str], windows: int
) -> dict[str, Side]:
    """Start an engine for every policy; return who runs it."""
    engines = {policy: PUSHED[policy].engine_flags if policy in PUSHED else (policy,) for policy in policies}
    sides: dict[tuple[str, ...], Side] = {}
    for number, (policy, own) in enumerate(engines.items()):
        if own in sides:
            continue
        at = directory / str(number)
        at.mkdir()
        side = Pushed([*flags, *own], at, windows) if policy in PUSHED else Penstock(policy, flags, at)
        sides[own] = await stack.enter_async_context(side)
    await asyncio.gather(*(side.ready() for side in sides.values()))
    return {policy: sides[own] for policy, own in engines.items()}


class Bench:
    """One workload on running engines."""

    def __init__(self, sides: dict[str, Side], directory: Path, model: Path) -> None:
        """Run on `sides`; files go to `directory`."""
        self._sides, self._directory, self._model = sides, directory, model
        self._traces = {side: Trace(side.trace) for side in set(sides.values())}

    async def run(self, policy: str, workload: Workload, seed: int, push_rps: float) -> Outcome:
        """Run every request of the workload under a policy."""
        lines = batch_lines(workload, self._model / "tokenizer.json", seed)
        side = self._sides[policy]
        trace = self._traces[side]
        trace.skip()
        arrivals_s = workload.arrivals_s(push_rps)
        done = await side.run(policy, lines, arrivals_s)
        meter = trace.meter([done.started_ns + int(at_s * 1e9) for at_s in arrivals_s], workload.shape.blocks)
        meter.elapsed_ns = done.ended_ns - done.started_ns
        # The KV of a request's last token is never written.
        needed = sum(item.prompt_tokens + item.output_tokens - 1 for item in workload.items)
        meter.recomputed_tokens = max(meter.computed_tokens - needed, 0)
        if done.refusals:
            print(f"  {policy}: refused {done.refusals} times", flush=True)
        _check(policy, workload, [life.tokens for life in meter.lives], done.output_tokens)
        outcome = Outcome.of(workload.name, policy, seed, workload, meter)
        # With a prefix cache less than all is computed, and nothing says how much less: what was lost cannot be told.
        return replace(outcome, recomputed_share=None) if workload.shape.prefix_caching else outcome


def _check(policy: str, workload: Workload, by_engine: list[int], by_client: int) -> None:
    """Every request ran once to its own length, and every token arrived."""
    wanted = [item.output_tokens for item in workload.items]
    if by_engine != wanted:
        wrong = [i for i, (got, want) in enumerate(zip(by_engine, wanted, strict=True)) if got != want]
        raise SystemExit(f"{policy}: {len(wrong)} requests did not run once to their length, the first is {wrong[0]}")
    if by_client != sum(wanted):
        raise SystemExit(f"{policy}: the client has {by_client} output tokens of {sum(wanted)}")


def order(policies: Sequence[str], number: int) -> list[str]:
    """Return the order of a round. In twice as many rounds as policies each follows each other as often (Williams)."""
    count_of = len(policies)
    zigzag = [(at + 1) // 2 if at % 2 else -(at // 2) for at in range(count_of)]
    found = [policies[(at + number) % count_of] for at in zigzag]
    # Of an odd number of them a round and its mirror image make the balance.
    return found[::-1] if count_of % 2 and number % 2 else found


async def compare(
    made: Sequence[Workload], options: argparse.Namespace, policies: list[str], directory: Path
) -> list[Outcome]:
    """Alternate the policies over one workload's rounds, the last of which warms up; return one outcome for each."""
    *rounds, warm_up = made
    name, shape = warm_up.name, warm_up.shape
    model = directory / "model"
    make_model(model, options.model, shape.window_tokens)
    print(f"\n{name}, {options.requests} requests: {warm_up.source}\n  window {shape.window_tokens}, {shape.blocks} "
          f"blocks of {shape.block_size}, model {options.model}, {options.rounds} rounds", flush=True)  # fmt: skip
    async with AsyncExitStack() as stack:
        flags = engine_flags(model, MODELS[options.model], shape, prefix_caching=shape.prefix_caching)
        windows = shape.blocks * shape.block_size // shape.window_tokens
        sides = await start(stack, directory, policies, flags, windows)
        bench = Bench(sides, directory, model)
        push_rps, outcomes = 0.0, []
        for policy in policies:
            # The first policy's warm-up comes all at once; from its rate those of timed arrivals follow.
            outcome = await bench.run(
                policy, warm_up if push_rps else replace(warm_up, load=None), options.rounds, push_rps
            )
            push_rps = push_rps or outcome.requests_per_s
        for number, workload in enumerate(rounds):
            for policy in order(policies, number):
                outcomes.append(outcome := await bench.run(policy, workload, number, push_rps))
                print(f"  round {number}, {policy}: {outcome.requests_per_s:.2f} requests/s, usage {outcome.usage:.3f},"
                      f" {outcome.preemptions_per_1000:.1f} preemptions per 1,000", flush=True)  # fmt: skip
    return sorted(outcomes, key=lambda outcome: (policies.index(outcome.policy), outcome.seed))


def _rounds(name: str, options: argparse.Namespace) -> list[Workload]:
    """Return a workload's rounds, the last of which warms up."""
    scale, rounds = SCALES[options.scale], options.rounds
    made = workloads.of_seeds(name, options.requests, scale, range(rounds))
    return [*made.values(), *workloads.of_seeds(name, options.warm_up or options.requests, scale, [rounds]).values()]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=[*workloads.WORKLOADS, "all"], default=["kv-bound"])
    parser.add_argument(
        "--policies", type=push_first((*PUSHED, *PENSTOCK)), default="all",
        help="comma-separated, or all; the first has to be push, as the rate of timed arrivals is a share of its own",
    )  # fmt: skip
    parser.add_argument("--requests", type=count, default=600)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--warm-up", type=count, help="requests of each policy's warm-up, as many as --requests by default"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--scale", choices=sorted(SCALES), default="cpu", help="of the workloads' lengths")
    parser.add_argument("--out", type=folder, default="build/bench")
    options = parser.parse_args()
    names = list(workloads.WORKLOADS) if "all" in options.workload else options.workload
    # All of them first: a trace that is too short for one ends nothing in the middle.
    made = [_rounds(name, options) for name in names]
    os.environ.update(MODELS[options.model].device.environment)
    lines: list[dict[str, Any]] = []
    for rounds in made:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = asyncio.run(compare(rounds, options, options.policies, Path(directory)))
        lines += print_table(outcomes, options.out)
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
