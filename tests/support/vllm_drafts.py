"""vLLM's scheduler without a model, with tokens drafted for every sequence: so many of them are accepted."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from services.worker.simulated.batch import Rules
from tests.support.replay import Workload
from tests.support.vllm_scheduler import make_scheduler

DRAFTERS = ("ngram", "draft_model")
BLOCKS = 4096
DRAFTED = 3
"""Tokens drafted for a sequence in each step."""


def speculative_config(model: str, drafter: str) -> Any:
    """Return vLLM's configuration for a model with one of `DRAFTERS`, itself as the draft model; "" for none."""
    from vllm import AsyncEngineArgs

    drafts = {
        "ngram": {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 3},
        "draft_model": {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTED},
    }
    return AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, max_model_len=2048, block_size=32, skip_tokenizer_init=True,
        speculative_config=drafts.get(drafter),
    ).create_engine_config()  # fmt: skip


def workload(step_tokens: int = 2048) -> Workload:
    """Return one in blocks of one token, so many of them in a step at most."""
    return Workload([], BLOCKS, 1, 4, step_tokens, Rules(enable_prefix_caching=False))


def most_held(
    config: Any,
    prompt: int,
    output: int,
    accepts: float,
    rng: random.Random,
    step_tokens: int = 2048,
    sliding_tokens: int = 0,
) -> int:
    """Return the most slots that a sequence of `prompt` and `output` tokens has, alone in blocks of one token.

    Its layers look at the last `sliding_tokens`, or at all.

    Each drafted token is accepted with the chance `accepts`, up to the first that is not. With asynchronous scheduling
    a step's result is there only after the next one has been scheduled.
    """
    from vllm import SamplingParams
    from vllm.v1.request import Request

    scheduler = make_scheduler(config, workload(step_tokens), sliding_tokens)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    scheduler.add_request(Request("r0", list(range(prompt)), params, None))
    depth = 2 if config.scheduler_config.async_scheduling else 1
    under_way: deque[tuple[Any, set[str]]] = deque()
    most = 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        most = max(most, BLOCKS - scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        known = {
            name for name in step.num_scheduled_tokens
            if scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_prompt_tokens
        }  # fmt: skip
        under_way.append((step, known))
        if len(under_way) == depth or not step.total_num_scheduled_tokens:
            done, through = under_way.popleft()
            finish(scheduler, done, through, accepts, rng)
    return most


def finish(scheduler: Any, step: Any, known: set[str], accepts: float, rng: random.Random) -> None:
    """Give the scheduler the tokens that a step has brought, and the drafts for the next one.

    Only those sequences have a token whose prompt is `known` as a whole.
    """
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    sampled: list[list[int]] = []
    for name in step.num_scheduled_tokens:
        if name not in known:
            sampled.append([])
            continue
        drafts = len(step.scheduled_spec_decode_tokens.get(name, ()))
        accepted = next((n for n in range(drafts) if rng.random() >= accepts), drafts)
        sampled.append([9] * (accepted + 1))
    names = list(step.num_scheduled_tokens)
    scheduler.update_from_output(step, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled))
    if scheduler.num_spec_tokens and not scheduler.scheduler_config.async_scheduling:
        scheduler.update_draft_token_ids(DraftTokenIds(names, [[9] * scheduler.num_spec_tokens for _ in names]))
