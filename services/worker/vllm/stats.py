"""What vLLM reports of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from services.worker.core.messages import EngineReported
from services.worker.engine import StepTokens


class EngineStats:
    """Per-step stats of the engine core of one AsyncLLM."""

    def __init__(self, config: Any) -> None:
        """Read block numbers from vLLM's `config` once the engine has set them."""
        self._config = config
        self._preemptions = 0
        self._prefill_ns = 0
        self._prefill_tokens = 0
        self._last_s = 0.0
        self.sink: Callable[[EngineReported], None] = lambda _: None
        self.token_sink: Callable[[StepTokens], None] = lambda _: None
        self._shared: Callable[[int, Any], int] = lambda _taken, _stats: 0

    def find_shared(self, shared: Callable[[int, Any], int]) -> None:
        """Ask `shared` after each step how many blocks are held together, of so many that are taken."""
        self._shared = shared

    @property
    def blocks_total(self) -> int:
        """Usable blocks: vLLM keeps one as its null block."""
        blocks: int = self._config.cache_config.num_gpu_blocks
        return blocks - 1

    def logger(self, *_: Any, **__: Any) -> Any:
        """Return a stat logger; vLLM calls this with its configuration and the number of the core."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            """Hands every record to the collector."""

            def __init__(self, *_: Any, **__: Any) -> None:
                """Keep nothing: there is one core."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                stats.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say: the service logs the engine's size itself."""

        return Logger()

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Take one step's stats; either part may be None."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
            for ended in iteration_stats.finished_requests:
                if not ended.num_generation_tokens:
                    # Nothing was prefilled to its end; the time of what never started would be that since the boot.
                    continue
                self._prefill_ns += int(ended.prefill_time * 1e9)
                self._prefill_tokens += ended.num_prompt_tokens - ended.num_cached_tokens
            generated = iteration_stats.num_generation_tokens
            if generated:
                self.token_sink(StepTokens(generated, iteration_stats.inter_token_latencies_iter))
        if scheduler_stats is None:
            return
        now_s = time.monotonic()
        step_ns = int((now_s - self._last_s) * 1e9) if self._last_s else 0
        running = scheduler_stats.num_running_reqs
        # The pause before the next step of an idle engine is no step.
        self._last_s = now_s if running else 0.0
        usage = scheduler_stats.kv_cache_usage
        waiting = scheduler_stats.num_waiting_reqs + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        free = round((1 - usage) * self.blocks_total)
        shared = self._shared(self.blocks_total - free, iteration_stats)
        counts = self._preemptions, step_ns, usage, self._prefill_ns, self._prefill_tokens
        self.sink(EngineReported(free, running, waiting, *counts, shared))


class RunPreemptions:
    """How often the completions of one run were preempted. vLLM tells with an output only those of one of them.

    It counts each one's in an object that it keeps for it in its front-end's records, which are no public interface:
    where they do not look as expected, what the outputs tell is all there is.
    """

    def __init__(self, processor: Any, run_id: str) -> None:
        """Read the records of vLLM's `processor` of outputs at the first output; then they have every completion."""
        self._processor = processor
        self._run_id = run_id
        self._counted: dict[int, Any] = {}

    def count(self, output: Any) -> int:
        """Return the sum as of an output of the run."""
        if not self._counted:
            names = getattr(self._processor, "external_req_ids", {}).get(self._run_id, ())
            states = getattr(self._processor, "request_states", {})
            self._add(*(getattr(states.get(name), "stats", None) for name in names))
        self._add(getattr(output, "metrics", None))
        return sum(getattr(stats, "num_preemptions", 0) for stats in self._counted.values())

    def _add(self, *found: Any) -> None:
        self._counted.update((id(stats), stats) for stats in found if stats is not None)


def no_metrics() -> Any:
    """Return a logger that takes the place of vLLM's own for Prometheus, and keeps nothing.

    vLLM counts a dozen series, some of them for every sequence, in every step, whether anybody reads them or not.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoMetrics(PrometheusStatLogger):  # type: ignore[misc]
        """vLLM adds its own logger unless it is given one of this kind."""

        def __init__(self, *_: Any, **__: Any) -> None:
            """Register nothing."""

        def record(self, *_: Any, **__: Any) -> None:
            """Keep nothing of a step."""

        def record_sleep_state(self, *_: Any, **__: Any) -> None:
            """Keep nothing of a pause."""

        def record_admission_rejection(self, *_: Any, **__: Any) -> None:
            """Keep nothing of a refusal."""

        def log_engine_initialized(self) -> None:
            """Say nothing."""

    return NoMetrics
