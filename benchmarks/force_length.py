"""A vLLM logits processor that ends a request with a real end-of-sequence token after a chosen length.

A model with random weights has no idea when to stop. This gives each request the length its trace says,
without the queue, the scheduler or vLLM's own scheduler knowing it beforehand: `max_tokens` stays a cap.
Load it with `--logits-processors benchmarks.force_length:ForceLength` and name the length in the body as
`"vllm_xargs": {"output_tokens": 37}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

ARGUMENT = "output_tokens"


class ForceLength(AdapterLogitsProcessor):  # type: ignore[misc]
    """Masks end-of-sequence until output token `output_tokens`, then leaves nothing else."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Take the end-of-sequence token from the model's configuration."""
        super().__init__(vllm_config, device, is_pin_memory)
        eos = vllm_config.model_config.hf_config.eos_token_id
        self._eos_ids: list[int] = list(eos) if isinstance(eos, list) else [eos]

    def is_argmax_invariant(self) -> bool:
        """Say that greedy sampling is affected."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Return the request's processor, or None if it names no length."""
        length = (params.extra_args or {}).get(ARGUMENT)
        if length is None:
            return None

        def apply(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) + 1 < int(length):
                logits[self._eos_ids] = -torch.inf
            else:
                kept = logits[self._eos_ids[0]].clone()
                logits.fill_(-torch.inf)
                logits[self._eos_ids[0]] = kept
            return logits

        return apply
