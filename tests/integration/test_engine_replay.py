"""The engine model against vLLM: the same requests in the same order give the same steps, to the block.

First against vLLM's scheduler alone, with random requests and rules; then against a whole engine with a model.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.simulated.batch import Rules
from tests.support.replay import Arrival, Workload, first_difference, through_model
from tests.support.vllm_engine_replay import BLOCK_SIZE, BLOCKS, packed, unpacked_steps

pytestmark = pytest.mark.vllm

LONGEST = 450
"""Tokens of the longest request below; an engine that cannot hold one request would never end."""

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VLLM_ENVIRONMENT.items():
            patch.setenv(name, value)
        from tests.support.vllm_scheduler import tiny_config

        return tiny_config(str(tiny_model))


@st.composite
def arrivals(draw: st.DrawFn, block_size: int) -> list[Arrival]:
    """Requests whose prompts share beginnings, some of them whole, in bursts and trickles; a few are aborted.

    Some have several completions, and now and then the clock that says when they came is set back.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    stems = [[rng.randrange(4) for _ in range(10 * block_size)] for _ in range(3)]
    made: list[Arrival] = []
    at_step, now_s = 0, 100.0
    for _ in range(draw(st.integers(1, 30))):
        stem = rng.choice(stems)
        if rng.random() < 0.2:
            prompt = stem[: block_size * rng.randint(1, 8)]
        else:
            prompt = stem[: rng.randrange(200)] + [9 + rng.randrange(5) for _ in range(rng.randint(1, 100))]
        at_step += rng.choice((0, 0, 0, 1, 5, 20))
        abort_at_step = at_step + rng.randrange(60) if rng.random() < 0.1 else None
        now_s += rng.choice((1.0, 1.0, 1.0, -3.0))
        priority = rng.choice((0, 0, 0, -1, 2))
        made += [
            Arrival(prompt, rng.randint(1, 150), at_step, abort_at_step, priority, now_s)
            for _ in range(rng.choice((1, 1, 1, 2, 4)))
        ]
    return made


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    block_size = draw(st.sampled_from((16, 32)))
    seqs = draw(st.sampled_from((4, 16, 64)))
    rules = Rules(
        watermark=draw(st.sampled_from((0.0, 0.05, 0.3))),
        long_prefill_token_threshold=draw(st.sampled_from((0, 10, 50))),
        scheduler_reserve_full_isl=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
    )
    budget = max(seqs, draw(st.sampled_from((20, 64, 200, 2048))))
    blocks = draw(st.integers(-(-LONGEST // block_size), 90))
    return Workload(draw(arrivals(block_size)), blocks, block_size, seqs, budget, rules)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=workloads())
def test_every_step_is_the_schedulers(config: Any, workload: Workload) -> None:
    from tests.support.vllm_scheduler import through_scheduler

    assert not first_difference(through_model(workload), through_scheduler(config, workload))


def text(seed: int, blocks: int, block_size: int = 16) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 2048) for _ in range(blocks * block_size + 1)]


RARE_WORKLOADS = {
    "the watermark does not hold back a request that is alone": Workload(
        [Arrival(text(1, 17), 5), Arrival(text(2, 2), 5)], 20, 16, rules=Rules(watermark=0.3)
    ),
    # The first two end in one step; the third takes some of their blocks, the last sees of whom.
    "blocks of sequences that end together are lost in the order they ran": Workload(
        [Arrival(text(seed, blocks), 5, at) for seed, blocks, at in ((1, 8, 0), (2, 8, 0), (3, 10, 10), (1, 8, 20))],
        20,
        16,
    ),
    # vLLM gives the completions of one request one time of arrival, and takes the first of equals for the last.
    "of the completions of one request the last is preempted": Workload(
        [Arrival(text(1, 1), output, arrived_s=7.0) for output in (90, 100, 110)],
        14,
        16,
        rules=Rules(scheduling_policy="priority"),
    ),
}
"""What random workloads hardly ever show."""


@pytest.mark.parametrize("name", RARE_WORKLOADS)
def test_rare_steps_are_the_schedulers_too(config: Any, name: str) -> None:
    from tests.support.vllm_scheduler import through_scheduler

    workload = RARE_WORKLOADS[name]
    assert not first_difference(through_model(workload), through_scheduler(config, workload))


def requests(seed: int, count: int, prompt: tuple[int, int], output: tuple[int, int], shared: int = 0) -> list[Arrival]:
    """Requests that all come at once; the first `shared` prompt tokens are one of two texts."""
    rng = random.Random(seed)
    stems = [[rng.randrange(6, 2048) for _ in range(shared)] for _ in range(2)]
    return [
        Arrival(
            [*rng.choice(stems), *(rng.randrange(6, 2048) for _ in range(rng.randint(*prompt)))], rng.randint(*output)
        )
        for _ in range(count)
    ]


ENGINE_WORKLOADS = {
    "short of blocks": Workload(requests(1, 30, (20, 120), (20, 120)), BLOCKS, BLOCK_SIZE),
    "chunked prefill": Workload(
        requests(2, 14, (200, 500), (10, 60)), BLOCKS, BLOCK_SIZE, 16, 128, Rules(long_prefill_token_threshold=48)
    ),
    "shared prefixes": Workload(requests(3, 24, (10, 90), (20, 140), shared=200), BLOCKS, BLOCK_SIZE),
    "watermark": Workload(requests(4, 20, (20, 120), (20, 120)), BLOCKS, BLOCK_SIZE, rules=Rules(watermark=0.1)),
}


def through_engine(model: Path, wanted: list[Workload]) -> list[Any]:
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_engine_replay", str(model)],
        env={**os.environ, **VLLM_ENVIRONMENT},
        input=packed(wanted),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return unpacked_steps(made.stdout)


@pytest.mark.long
def test_every_step_is_the_engines(tiny_model: Path) -> None:
    runs = through_engine(tiny_model, list(ENGINE_WORKLOADS.values()))
    for (name, workload), theirs in zip(ENGINE_WORKLOADS.items(), runs, strict=True):
        assert not first_difference(through_model(workload), theirs), name
        if not workload.rules.watermark:
            assert any(step.preempted for step in theirs), f"{name}: nobody was preempted"
