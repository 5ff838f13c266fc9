"""Runs workloads through a real vLLM engine in this process, step by step.

`python -m tests.support.vllm_engine_replay MODEL` reads one JSON list of workloads from standard input and writes
one JSON list of their steps to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from services.worker.simulated.batch import Rules
from tests.support.replay import Arrival, Step, Timetable, Workload, name_of
from tests.support.vllm_scheduler import apply_rules, step_of

BLOCKS = 60
BLOCK_SIZE = 32
MAX_MODEL_LEN = 1024


def packed(workloads: list[Workload]) -> str:
    """Return workloads as JSON."""
    return json.dumps(
        [
            (
                [(list(a.prompt_ids), *a[1:]) for a in workload.arrivals],
                workload.max_num_seqs,
                workload.max_num_batched_tokens,
                workload.rules,
            )
            for workload in workloads
        ]
    )


def unpacked(text: str) -> list[Workload]:
    """Return the workloads that `packed` wrote."""
    return [
        Workload([Arrival(*a) for a in arrivals], BLOCKS, BLOCK_SIZE, seqs, tokens, Rules(*rules))
        for arrivals, seqs, tokens, rules in json.loads(text)
    ]


def unpacked_steps(text: str) -> list[list[Step]]:
    """Return the steps that this program wrote."""
    return [
        [Step(*step)._replace(running=[(name, computed) for name, computed in step[3]]) for step in run]
        for run in json.loads(text)
    ]


def make_engine(model: str) -> Any:
    """Start a synchronous engine; nothing happens between its steps."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model, dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE,
            num_gpu_blocks_override=BLOCKS + 1, skip_tokenizer_init=True,
            logits_processors=["benchmarks.force_length:ForceLength"],
        )
    )  # fmt: skip


def replay(engine: Any, workload: Workload) -> list[Step]:
    """Run one workload; every answer ends with a real end-of-sequence token."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    scheduler = engine.engine_core.engine_core.scheduler
    set_rules(scheduler, workload)
    assert engine.reset_prefix_cache()
    table = Timetable(workload.arrivals)
    steps: list[Step] = []
    update = scheduler.update_from_output

    def recorded(output: Any, model_output: Any) -> Any:
        result = update(output, model_output)
        steps.append(step_of(scheduler, output))
        return result

    scheduler.update_from_output = recorded
    while engine.has_unfinished_requests() or table.more:
        added, _ = table.due(len(steps), not engine.has_unfinished_requests())
        for number in added:
            arrival = workload.arrivals[number]
            params = SamplingParams(
                max_tokens=MAX_MODEL_LEN, detokenize=False, extra_args={"output_tokens": arrival.output_tokens}
            )
            engine.add_request(name_of(number), tokens_input(list(arrival.prompt_ids)), params)
        engine.step()
    scheduler.update_from_output = update
    return steps


def set_rules(scheduler: Any, workload: Workload) -> None:
    """Give a running engine's scheduler the workload's rules, where it reads them."""
    apply_rules(scheduler.scheduler_config, workload)
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = workload.max_num_seqs
    scheduler.max_num_scheduled_tokens = workload.max_num_batched_tokens
    scheduler.scheduler_reserve_full_isl = workload.rules.scheduler_reserve_full_isl
    # The null block is one of vLLM's.
    scheduler.kv_cache_manager.watermark_blocks = int(workload.rules.watermark * (workload.blocks + 1))


def main() -> None:
    """Replay what comes on standard input."""
    # What libraries print must not get between the lines of the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make_engine(sys.argv[1])
    json.dump([replay(engine, workload) for workload in unpacked(sys.stdin.read())], answer)
    answer.close()


if __name__ == "__main__":
    main()
