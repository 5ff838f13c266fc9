"""Fits the engine model's step time to real vLLM on this machine.

Usage: python -m benchmarks.fit_engine [--profile cpu-tiny] [--rounds 3]

Real vLLM and the model take the same steps over the same requests (tests/integration/test_engine_replay.py), so what
each step computed is the model's to say and only its time has to be measured: one call of the engine core's step,
scheduling and sampling included, the front-end not. The seconds are fitted linearly to the load with every step
weighted by its inverse time, which makes errors relative; requests with other lengths, short of blocks, are held out.
The engine runs as the benchmarks run it: float32, eager, forced lengths.

Run it on an idle machine. Last line: JSON with the coefficients and errors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.tiny_model import Shape, make_tiny_model
from services.worker.simulated_batch import Batch, Rules
from services.worker.simulated_profile import Fitted
from services.worker.simulated_sequence import Sequence, StepResult

MODELS = {
    "cpu-tiny": Shape(),
    "cpu-small": Shape(layers=4, hidden_size=512, heads=8),
}
"""Profile and the model it is fitted with."""

BLOCKS = 1600
"""Enough for 256 sequences of 200 tokens; few enough that the held-out requests are short of them."""

BLOCK_SIZE = 32
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
WINDOW_TOKENS = 2048
VOCABULARY = (6, 2048)
"""Ids of ordinary tokens; those before are special."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""One OpenMP thread, as the benchmarks' workers have."""


class Item(NamedTuple):
    """One request."""

    prompt: list[int]
    output_tokens: int
    at_step: int


class Sample(NamedTuple):
    """One step: what it computed, the CPU seconds of the engine's thread, and the time that passed."""

    result: StepResult
    seconds: float
    wall_s: float


def items(seed: int, count: int, prompt: tuple[int, int], output: tuple[int, int], every: int) -> list[Item]:
    """Return requests of random lengths, one before every `every`-th step (0: all at once)."""
    rng = random.Random(seed)
    return [
        Item([rng.randrange(*VOCABULARY) for _ in range(rng.randint(*prompt))], rng.randint(*output), index * every)
        for index in range(count)
    ]


def fitted_items(seed: int) -> list[list[Item]]:
    """Return workloads that cover batches of 1 to 256, short and long contexts, small and full prefills."""
    at_once = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    steady = [(12, 12), (40, 5), (90, 2), (150, 1)]
    return [
        *(items(seed + n, count, (16, 300 if count > 60 else 1500), (30, 80), 0) for n, count in enumerate(at_once)),
        *(items(seed + 50 + n, count, (16, 700), (20, 120), every) for n, (count, every) in enumerate(steady)),
    ]


def held_out_items(seed: int) -> list[Item]:
    """Return requests that want twice the blocks there are."""
    return items(seed, 400, (20, 400), (10, 250), 0)


def make_engine(model: Path) -> Any:
    """Start vLLM in this process, to be stepped by hand."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=WINDOW_TOKENS,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=BLOCKS + 1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            logits_processors=["benchmarks.force_length:ForceLength"],
        )
    )


class Bench:
    """A real engine and the model side by side."""

    def __init__(self, engine: Any) -> None:
        """Time every step of the engine core."""
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._seconds: list[tuple[float, float]] = []
        self._tokens: list[int] = []
        self._serial = 0
        self._hook()

    def _hook(self) -> None:
        core, step, schedule = self._core, self._core.step_fn, self._core.scheduler.schedule

        def timed() -> Any:
            started, wall = time.thread_time(), time.perf_counter()
            result = step()
            self._seconds.append((time.thread_time() - started, time.perf_counter() - wall))
            return result

        def counted(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self._tokens.append(output.total_num_scheduled_tokens)
            return output

        core.step_fn, core.scheduler.schedule = timed, counted

    def run(self, wanted: list[Item]) -> list[Sample]:
        """Run requests through both; return their steps. Raises RuntimeError if the steps differ."""
        self._seconds.clear()
        self._tokens.clear()
        rules = Rules(enable_prefix_caching=False)
        batch = Batch(BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, rules)
        to_come = list(reversed(wanted))
        results: list[StepResult] = []
        while batch.busy or to_come:
            while to_come and (to_come[-1].at_step <= len(results) or not batch.busy):
                self._add(to_come.pop(), batch)
            self._engine.step()
            results.append(batch.step())
        if [result.computed_tokens for result in results] != self._tokens:
            raise RuntimeError("vLLM and the model took different steps")
        return [Sample(result, *seconds) for result, seconds in zip(results, self._seconds, strict=True)]

    def _add(self, item: Item, batch: Batch) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        self._serial += 1
        name = f"r{self._serial}"
        extra = {"output_tokens": item.output_tokens}
        params = SamplingParams(max_tokens=WINDOW_TOKENS, temperature=0, detokenize=False, extra_args=extra)
        self._engine.add_request(name, tokens_input(item.prompt), params)
        batch.add(Sequence(name, len(item.prompt), item.output_tokens))


def row(result: StepResult) -> tuple[float, ...]:
    """Return a step's load in the order of the coefficients of `Fitted`."""
    return (1.0, result.decoding + result.prefills, result.prefill_tokens, result.kv_tokens_read)


def fit(samples: list[Sample]) -> Fitted:
    """Return the non-negative coefficients with the least squared relative error."""
    seconds = np.array([sample.seconds for sample in samples])
    loads = np.array([row(sample.result) for sample in samples])
    weighted = loads / seconds[:, None]
    kept = list(range(loads.shape[1]))
    while True:
        found = np.linalg.lstsq(weighted[:, kept], np.ones(len(samples)), rcond=None)[0]
        if (found >= 0).all():
            break
        # Nothing takes negative time: what would is left out.
        kept.pop(int(np.argmin(found)))
    coefficients = np.zeros(loads.shape[1])
    coefficients[kept] = found
    step, per_sequence, per_prefill_token, per_kv_token = (float(f"{value:.3g}") for value in coefficients)
    return Fitted(step, per_sequence, per_prefill_token, per_kv_token)


class Error(NamedTuple):
    """How far a profile is off: of all steps' time together, of the median and of the 90th percentile step."""

    total: float
    median: float
    p90: float


def error(profile: Fitted, samples: list[Sample]) -> Error:
    """Return the relative error of a profile on steps that were measured."""
    seconds = np.array([sample.seconds for sample in samples])
    predicted: npt.NDArray[np.float64] = np.array([profile.step_s(sample.result) for sample in samples])
    off = np.abs(predicted / seconds - 1)
    total = float(predicted.sum() / seconds.sum() - 1)
    return Error(*(round(float(value), 3) for value in (total, np.median(off), np.quantile(off, 0.9))))


def main() -> None:
    """Measure, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=MODELS, default="cpu-tiny")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=Path, help="also write every step as a line of CSV")
    arguments = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(make_engine(make_tiny_model(Path(directory), MODELS[arguments.profile])))
        fitted, held_out = measure(bench, arguments.rounds)
    if arguments.samples:
        lines = [
            ",".join(map(str, (*row(s.result), s.result.attended_tokens, s.seconds, s.wall_s)))
            for s in fitted + held_out
        ]
        arguments.samples.write_text("\n".join(lines) + "\n")
    profile = fit(fitted)
    print(f"{arguments.profile}: {profile}")
    print(f"steps fitted: {len(fitted)}, error {error(profile, fitted)}")
    print(f"steps held out: {len(held_out)}, error {error(profile, held_out)}")
    print(
        json.dumps(
            {
                "profile": arguments.profile,
                "coefficients": profile._asdict(),
                "error": error(profile, fitted)._asdict(),
                "held_out_error": error(profile, held_out)._asdict(),
            }
        )
    )


def measure(bench: Bench, rounds: int) -> tuple[list[Sample], list[Sample]]:
    """Return the steps to fit and the steps held out, from alternating runs."""
    bench.run(items(0, 64, (16, 300), (20, 40), 0))  # first steps are slow: memory is touched, kernels are chosen
    fitted: list[Sample] = []
    held_out: list[Sample] = []
    for number in range(rounds):
        for wanted in fitted_items(1000 * (number + 1)):
            fitted += bench.run(wanted)
        held_out += bench.run(held_out_items(1000 * (number + 1) + 500))
    return fitted, held_out


if __name__ == "__main__":
    main()
