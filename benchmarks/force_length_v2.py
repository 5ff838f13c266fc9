"""The lengths of force_length.py for vLLM's second model runner, which has an interface of its own.

Load it with `--logits-processors benchmarks.force_length_v2:ForceLength`. The host does not know a request's last
tokens there when the next step is prepared: what is counted is the position of each row, on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from benchmarks.force_length import ARGUMENT

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState


class ForceLength(LogitsProcessor):  # type: ignore[misc]
    """Masks end-of-sequence until output token `output_tokens`, then leaves nothing else."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        """Take the end-of-sequence tokens from the model's configuration."""
        eos = vllm_config.model_config.hf_config.eos_token_id
        self._eos_ids = torch.tensor(eos if isinstance(eos, list) else [eos], device=req_states.device)
        self._others = torch.ones(req_states.vocab_size, dtype=torch.bool, device=req_states.device)
        self._others[self._eos_ids[0]] = False
        self._prompt_tokens = req_states.prompt_len
        # By slot, here and on the device; 0 where a request names no length.
        self._lengths = torch.zeros(req_states.max_num_reqs, dtype=torch.int32)
        self._on_device = self._lengths.to(req_states.device, copy=True)
        self._changed = False

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note the length of the request in a slot; say whether it has one."""
        length = int((sampling_params.extra_args or {}).get(ARGUMENT, 0))
        self._lengths[req_idx] = length
        self._changed = True
        return length > 0

    def apply_staged_writes(self) -> None:
        """Bring the lengths to the device, in the order of its steps."""
        if self._changed:
            self._on_device.copy_(self._lengths)
            self._changed = False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask in place. The token that a row samples stands behind the row's position, which counts from 0."""
        slots = ctx.expanded_idx_mapping
        lengths = self._on_device[slots]
        sampled = ctx.pos + 2 - self._prompt_tokens.gpu[slots]
        named = lengths > 0
        ending = named & (sampled >= lengths)
        kept = (named & ~ending).unsqueeze(1)
        logits[:, self._eos_ids] = logits[:, self._eos_ids].masked_fill(kept, -torch.inf)
        return logits.masked_fill_(ending.unsqueeze(1) & self._others, -torch.inf)
