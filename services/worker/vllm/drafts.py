"""What speculative decoding cannot do on a CPU: to sample."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import SamplingType

from services.worker.engine import RequestRefusedError


def refuse_sampled(config: Any, params: SamplingParams) -> None:
    """Raise RequestRefusedError for a run that is not greedy, if the engine of vLLM's `config` drafts on a CPU.

    What vLLM has there for the kernel that gives each drafted token the temperature, `top_p` and `top_k` of its run
    writes into a copy of them: what was in memory counts. In a step with such a run it counts for all, so that greedy
    ones say something else as well, and a `top_k` ends the engine core, drafted tokens or none.
    """
    if config.speculative_config is None or config.device_config.device_type != "cpu":
        return
    if params.sampling_type is not SamplingType.GREEDY:
        text = (
            f"temperature {params.temperature:g}: vLLM on a CPU cannot sample with --speculative-config, only "
            "temperature 0 is served"
        )
        raise RequestRefusedError("unsupported_parameter", text, "sampling.temperature")
