"""A vLLM logits processor that ends a request with a real end-of-sequence token after a chosen length.

A model with random weights has no idea when to stop. This gives each request the length its trace says,
without the queue, the scheduler or vLLM's own scheduler knowing it beforehand: `max_tokens` stays a cap.
Load it with `--logits-processors benchmarks.force_length:ForceLength` and name the length in the body as
`"vllm_xargs": {"output_tokens": 37}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

ARGUMENT = "output_tokens"


class Forced(NamedTuple):
    """A request's length, and its output tokens so far: vLLM appends to the list."""

    length: int
    output_ids: list[int]


class ForceLength(LogitsProcessor):  # type: ignore[misc]
    """Masks end-of-sequence until output token `output_tokens`, then leaves nothing else.

    It works on the whole batch at once: a call per request would slow down whoever runs many of them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Take the end-of-sequence token from the model's configuration."""
        del is_pin_memory
        eos = vllm_config.model_config.hf_config.eos_token_id
        self._eos_ids = torch.tensor(eos if isinstance(eos, list) else [eos], device=device)
        self._requests: dict[int, Forced] = {}
        self._rows = torch.tensor([], dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        """Say that greedy sampling is affected."""
        return False

    @staticmethod
    def _forced(params: SamplingParams, _prompt_ids: list[int] | None, output_ids: list[int]) -> Forced | None:
        """Return the request's length, or None if it names none."""
        length = (params.extra_args or {}).get(ARGUMENT)
        return None if length is None else Forced(int(length), output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow who is in which row of the batch."""
        if process_dict_updates(self._requests, batch_update, self._forced):
            self._rows = torch.tensor(sorted(self._requests), dtype=torch.long, device=self._rows.device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask in place."""
        if not self._requests:
            return logits
        ending = [row for row, forced in self._requests.items() if len(forced.output_ids) + 1 >= forced.length]
        end_id = self._eos_ids[0]
        kept = logits[ending, end_id]
        logits[self._rows.unsqueeze(1), self._eos_ids] = -torch.inf
        if ending:
            logits[ending] = -torch.inf
            logits[ending, end_id] = kept
        return logits
