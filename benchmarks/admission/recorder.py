"""vLLM's schedulers that write down what they do: the cache, the preemptions and every token, step by step.

Load one with `--scheduler-cls benchmarks.admission.recorder.Recorder`, or `.AsyncRecorder` where the next step is
scheduled while one runs. They schedule as vLLM does and write one JSON line a step to the file that
PENSTOCK_BENCH_TRACE names, so that every policy is measured at the same place. Requests name themselves with the
extra argument `item`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.admission.trace import FILE

ARGUMENT = "item"


class _Recording(Scheduler):  # type: ignore[misc]
    """The log. Times are of the monotonic clock, in ns; blocks are those held by requests."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Open the log."""
        super().__init__(*arguments, **keywords)
        self._items: dict[str, int] = {}
        self._entered: list[int] = []
        # Outputs come in the order of their steps; asynchronous scheduling has two of these under way.
        self._steps: deque[dict[str, Any]] = deque()
        # The null block is never free and never used.
        self._blocks_total = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self._log = open(os.environ[FILE], "a")  # noqa: SIM115 - it is open as long as the engine

    def add_request(self, request: Any) -> None:
        """Note who came."""
        arguments = getattr(request.sampling_params, "extra_args", None) or {}
        if ARGUMENT in arguments:
            self._items[request.request_id] = int(arguments[ARGUMENT])
            self._entered.append(int(arguments[ARGUMENT]))
        super().add_request(request)

    def schedule(self, *arguments: Any, **keywords: Any) -> Any:
        """Note what the step holds while it runs."""
        output = super().schedule(*arguments, **keywords)
        self._steps.append(
            {
                "scheduled_ns": time.monotonic_ns(),
                "held": self._held(),
                "running": len(self.running),
                "preempted": len(output.preempted_req_ids or ()),
                "computed": output.total_num_scheduled_tokens,
                "entered": self._entered,
            }
        )
        self._entered = []
        return output

    def update_from_output(self, *arguments: Any, **keywords: Any) -> Any:
        """Note who got how many tokens and who ended, and write the line."""
        outputs = super().update_from_output(*arguments, **keywords)
        tokens = [
            (self._items[one.request_id], len(one.new_token_ids), one.finish_reason is not None)
            for of_client in outputs.values()
            for one in of_client.outputs
            if one.request_id in self._items
        ]
        line = {
            **self._steps.popleft(),
            "updated_ns": time.monotonic_ns(),
            "held_after": self._held(),
            "tokens": tokens,
        }
        self._log.write(json.dumps(line) + "\n")
        if not self.running and not self.waiting:
            self._items.clear()
            self._log.flush()
        return outputs

    def _held(self) -> int:
        return int(self._blocks_total - self.kv_cache_manager.block_pool.get_num_free_blocks())


class Recorder(_Recording):
    """vLLM's scheduler with the log."""


class AsyncRecorder(_Recording, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with the log; vLLM goes by the class to tell which of the two it has."""
