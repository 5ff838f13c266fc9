"""Plain vLLM as the other side of a paired benchmark: every request is pushed into the engine at once.

Usage: python -m benchmarks.plain_vllm [engine flags]; then one batch file path per line on standard input.

One JSON line per file on standard output, after a first line that says the engine is up. The engine is vLLM's
AsyncLLM with the same flags the Penstock worker gets, so that both sides have the same KV cache, and is spared what the
worker spares it: series for Prometheus that nobody reads, and interruptions of the engine by its front-end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # What the cache has is named in blocks: without this vLLM also wants nearly all of the machine's memory to be free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""What vLLM finds where nothing else is said; it looks when it is imported."""

PR_SET_PDEATHSIG = 1


def usage_logger() -> Any:
    """Return the class of a logger that integrates KV-cache usage over time and counts preemptions."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Usage(StatLoggerBase):  # type: ignore[misc]
        """Integrates KV-cache usage over time, counts preemptions, and tells a listener what each step left."""

        latest: Usage

        def __init__(self, *_: Any, **__: Any) -> None:
            Usage.latest = self
            self.listen: Callable[[float, int, int], None] | None = None
            self.reset()

        def reset(self) -> None:
            self.preemptions, self.integral, self.busy_s, self.last = 0, 0.0, 0.0, (time.monotonic(), 0.0, 0)

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            now = time.monotonic()
            then, usage, running = self.last
            if running:
                self.integral += usage * (now - then)
                self.busy_s += now - then
            if iteration_stats is not None:
                self.preemptions += iteration_stats.num_preempted_reqs
            if scheduler_stats is not None:
                self.last = (now, scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs)
            if self.listen is not None:
                ended = 0 if iteration_stats is None else len(iteration_stats.finished_requests)
                self.listen(*self.last[1:], ended)

        def log_engine_initialized(self) -> None:
            pass

    return Usage


def make_engine() -> tuple[Any, Any]:
    """Start AsyncLLM with the flags of the command line; its processes die with this one."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs
    from vllm.envs import enable_envs_cache
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.worker.processes import yield_to_engine
    from services.worker.vllm.stats import no_metrics

    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    config = AsyncEngineArgs.from_cli_args(parser.parse_args()).create_engine_config()
    if on_cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    usage = usage_logger()
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[usage, no_metrics()], disable_log_stats=True)
    enable_envs_cache()
    if on_cpu:
        yield_to_engine()
    return engine, usage


async def generate(engine: Any, line: dict[str, Any], name: str) -> tuple[int, int]:
    """Run one line; return its prompt and output tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    body = line["body"]
    params = SamplingParams(
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        extra_args=body.get("vllm_xargs"),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for output in engine.generate({"prompt": body["prompt"]}, params, name):
        last = output
    return len(last.prompt_token_ids), len(last.outputs[0].token_ids)


async def run_file(engine: Any, usage: Any, path: Path, round_number: int) -> dict[str, Any]:
    """Push every line of a batch file at once; return what happened."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    await engine.reset_prefix_cache()
    usage.latest.reset()
    started = time.monotonic()
    tokens = await asyncio.gather(*(generate(engine, line, f"{round_number}-{i}") for i, line in enumerate(lines)))
    elapsed_s = time.monotonic() - started
    return {
        "requests": len(lines),
        "elapsed_s": elapsed_s,
        "prompt_tokens": sum(prompt for prompt, _ in tokens),
        "completion_tokens": sum(output for _, output in tokens),
        "preemptions": usage.latest.preemptions,
        "kv_usage": usage.latest.integral / max(usage.latest.busy_s, 1e-9),
    }


async def serve() -> None:
    """Answer file paths from standard input until it ends."""
    engine, usage = make_engine()
    print(json.dumps({"ready": True}), flush=True)
    round_number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        round_number += 1
        print(json.dumps(await run_file(engine, usage, Path(line.strip()), round_number)), flush=True)
    engine.shutdown()
    del engine  # its finalizer needs modules that the interpreter's own end has taken down already


if __name__ == "__main__":
    asyncio.run(serve())
