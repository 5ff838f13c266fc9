"""Fits the engine model's step time to real vLLM on this machine, or holds a derived profile against it.

Usage: python -m benchmarks.fit_engine [--profile cpu-tiny] [--rounds 3]

Real vLLM and the model take the same steps over the same requests (tests/integration/test_engine_replay.py), so what
each step computed is the model's to say and only its time has to be measured: one call of the engine core's step,
scheduling and sampling included, the front-end not. The seconds are fitted linearly to the load with every step
weighted by its inverse time, which makes errors relative; requests with other lengths, short of blocks, are held out.
The engine runs as the benchmarks run it (models.py, devices.py), but one step after the other.

A GPU profile is derived, not fitted: with one of these, on such a GPU, the line also has the errors of the derived
profile on the same steps, all held out from it, and the KV blocks that vLLM finds room for.

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

from benchmarks.devices import CPU, CUDA, GRAPHS, Device
from benchmarks.models import make_model
from benchmarks.options import count, file
from penstock.tiny_model import Dtype, Shape, make_tiny_model
from services.worker.simulated.batch import Batch, Rules
from services.worker.simulated.profile import PROFILES, Fitted, Profile
from services.worker.simulated.sequence import Sequence, StepResult


class Subject(NamedTuple):
    """The engine a profile is about. Its blocks are as many as vLLM finds room for where `blocks` is None."""

    device: Device
    shape: Shape | None
    block_size: int
    blocks: int | None
    max_num_batched_tokens: int
    window_tokens: int


SUBJECTS = {
    # Enough blocks for 256 sequences of 200 tokens; few enough that the held-out requests are short of them.
    "cpu-tiny": Subject(CPU, Shape(), 32, 1600, 2048, 2048),
    "cpu-small": Subject(
        CPU._replace(dtype=Dtype.BFLOAT16.value),
        Shape(layers=4, hidden_size=512, heads=8, dtype=Dtype.BFLOAT16),
        32, 1600, 2048, 2048,
    ),
    "h100-llama-8b": Subject(CUDA, None, 16, None, 8192, 16_384),
    "h200-llama-8b": Subject(CUDA, None, 16, None, 8192, 16_384),
}  # fmt: skip
"""By profile."""

MAX_NUM_SEQS = 256
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
    """One step: what it computed, its seconds (on CPU those of the engine's thread), and the time that passed."""

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


LONG_TOKENS = 12_100
"""The longest of long_items."""


def long_items(seed: int) -> list[list[Item]]:
    """Return workloads with prompts of many chunks, and contexts as long as production has them."""
    return [items(seed + 90, 16, (4000, 12_000), (40, 80), 0), items(seed + 91, 96, (1000, 6000), (40, 80), 2)]


def make_engine(model: Path, subject: Subject) -> Any:
    """Start vLLM in this process, to be stepped by hand."""
    os.environ.update(subject.device.environment)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    own: dict[str, Any] = {"enforce_eager": True}
    if subject.device is CUDA:
        own = {"compilation_config": GRAPHS, "async_scheduling": False, "load_format": "dummy"}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            dtype=subject.device.dtype,
            max_model_len=subject.window_tokens,
            block_size=subject.block_size,
            num_gpu_blocks_override=subject.blocks and subject.blocks + 1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=subject.max_num_batched_tokens,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            logits_processors=[subject.device.logits_processor],
            **own,
        )
    )


class Bench:
    """A real engine and the model side by side."""

    def __init__(self, engine: Any, subject: Subject) -> None:
        """Time every step of the engine core."""
        self._engine, self._subject = engine, subject
        self.blocks = int(engine.vllm_config.cache_config.num_gpu_blocks) - 1
        self._core = engine.engine_core.engine_core
        self._seconds: list[tuple[float, float]] = []
        self._tokens: list[int] = []
        self._serial = 0
        self._hook()

    def wanted(self, seed: int) -> list[list[Item]]:
        """Return the workloads to fit to: those of every engine, and long ones where the window has room."""
        long = long_items(seed) if self._subject.window_tokens >= LONG_TOKENS else []
        return [*fitted_items(seed), *long]

    def _hook(self) -> None:
        core, step, schedule = self._core, self._core.step_fn, self._core.scheduler.schedule

        def timed() -> Any:
            started, wall = time.thread_time(), time.perf_counter()
            result = step()
            seconds, wall_s = time.thread_time() - started, time.perf_counter() - wall
            # While a GPU computes, the thread of the engine does nothing.
            self._seconds.append((seconds if self._subject.device is not CUDA else wall_s, wall_s))
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
        subject = self._subject
        batch = Batch(self.blocks, subject.block_size, MAX_NUM_SEQS, subject.max_num_batched_tokens, rules)
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
        most = self._subject.window_tokens
        params = SamplingParams(max_tokens=most, temperature=0, detokenize=False, extra_args=extra)
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


def error(profile: Profile, samples: list[Sample]) -> Error:
    """Return the relative error of a profile on steps that were measured."""
    seconds = np.array([sample.seconds for sample in samples])
    predicted: npt.NDArray[np.float64] = np.array([profile.step_s(sample.result) for sample in samples])
    off = np.abs(predicted / seconds - 1)
    total = float(predicted.sum() / seconds.sum() - 1)
    return Error(*(round(float(value), 3) for value in (total, np.median(off), np.quantile(off, 0.9))))


def main() -> None:
    """Measure, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=SUBJECTS, default="cpu-tiny")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--samples", type=file, help="also write every step as a line of CSV")
    arguments = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    subject = SUBJECTS[arguments.profile]
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(make_engine(make(Path(directory), subject), subject), subject)
        fitted, held_out = measure(bench, arguments.rounds)
    if arguments.samples:
        lines = [
            ",".join(map(str, (*row(s.result), s.result.attended_tokens, s.seconds, s.wall_s)))
            for s in fitted + held_out
        ]
        arguments.samples.write_text("\n".join(lines) + "\n")
    profile = fit(fitted)
    found: dict[str, Any] = {}
    if subject.device is CUDA:
        derived = PROFILES[arguments.profile]
        found = {"blocks": bench.blocks, "derived_error": error(derived, fitted + held_out)._asdict()}
        print(f"derived: {derived.num_blocks} blocks, vLLM has {bench.blocks}; error {found['derived_error']}")
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
                **found,
            }
        )
    )


def make(directory: Path, subject: Subject) -> Path:
    """Make the model of a subject."""
    if subject.shape is not None:
        return make_tiny_model(directory, subject.shape)
    make_model(directory, "llama-8b", subject.window_tokens)
    return directory


def measure(bench: Bench, rounds: int) -> tuple[list[Sample], list[Sample]]:
    """Return the steps to fit and the steps held out, from alternating runs."""
    bench.run(items(0, 64, (16, 300), (20, 40), 0))  # first steps are slow: memory is touched, kernels are chosen
    fitted: list[Sample] = []
    held_out: list[Sample] = []
    for number in range(rounds):
        for wanted in bench.wanted(1000 * (number + 1)):
            fitted += bench.run(wanted)
        held_out += bench.run(held_out_items(1000 * (number + 1) + 500))
    return fitted, held_out


if __name__ == "__main__":
    main()
