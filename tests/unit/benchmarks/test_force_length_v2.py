"""The forced lengths of vLLM's second model runner, whose rows are counted by their position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

END, VOCABULARY = 1, 6


def sampled(forced: Any, slots: list[int], positions: list[int]) -> list[list[int]]:
    """Return the tokens that are left of each row's vocabulary."""
    import torch

    context = SimpleNamespace(expanded_idx_mapping=torch.tensor(slots), pos=torch.tensor(positions))
    logits = forced.apply(torch.zeros(len(slots), VOCABULARY), context)
    return [[token for token in range(VOCABULARY) if row[token] == 0] for row in logits.tolist()]


def test_a_request_ends_with_the_token_of_its_length_and_not_before() -> None:
    import torch

    from benchmarks.force_length_v2 import ForceLength

    prompts = {0: 2, 3: 10, 5: 4}
    prompt_len = torch.zeros(8, dtype=torch.int32)
    for slot, tokens in prompts.items():
        prompt_len[slot] = tokens
    states = SimpleNamespace(
        device=torch.device("cpu"), vocab_size=VOCABULARY, max_num_reqs=8, prompt_len=SimpleNamespace(gpu=prompt_len)
    )
    configuration = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(eos_token_id=END)))
    forced = ForceLength(configuration, states)
    wanted = {0: None, 3: {"output_tokens": 3}, 5: {"output_tokens": 1}}
    named = [forced.add_request(slot, SimpleNamespace(extra_args=args)) for slot, args in wanted.items()]
    assert named == [False, True, True]
    forced.apply_staged_writes()
    everything, no_end = list(range(VOCABULARY)), [token for token in range(VOCABULARY) if token != END]
    # The row at a prompt's last position samples the first token; rows come in any order.
    assert sampled(forced, [5, 0, 3], [3, 1, 9]) == [[END], everything, no_end]
    assert sampled(forced, [3, 0], [10, 2]) == [no_end, everything]
    assert sampled(forced, [0, 3], [3, 11]) == [everything, [END]]
    # A slot is another request's once its first has ended.
    forced.add_request(3, SimpleNamespace(extra_args=None))
    forced.apply_staged_writes()
    assert sampled(forced, [3], [11]) == [everything]
