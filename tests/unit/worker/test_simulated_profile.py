"""Step times: what makes a step longer, and by how much on a roofline."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from services.worker.simulated.profile import (
    H100_80GB,
    H200_141GB,
    LLAMA_8B,
    PROFILES,
    Assumed,
    Roofline,
)


class Load(NamedTuple):
    decoding: int = 0
    prefill_tokens: int = 0
    prefills: int = 0
    kv_tokens_read: int = 0
    attended_tokens: int = 0


def decode(sequences: int, context: int) -> Load:
    return Load(sequences, 0, 0, sequences * context, sequences * context)


def prefill(tokens: int) -> Load:
    return Load(0, tokens, 1, tokens, tokens * (tokens + 1) // 2)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_more_work_never_takes_less_time(name: str) -> None:
    step_s = PROFILES[name].step_s
    assert step_s(decode(8, 500)) <= step_s(decode(64, 500)) <= step_s(decode(64, 2000))
    assert step_s(prefill(100)) <= step_s(prefill(2000))


def test_an_instant_engine_takes_no_time() -> None:
    assert PROFILES["instant"].step_s(decode(256, 1000)) == 0


def test_a_decode_reads_the_weights_and_the_context() -> None:
    step_s = Roofline(H100_80GB, LLAMA_8B).step_s(decode(32, 1000))
    read_bytes = 2 * 8.03e9 + 32_000 * 131_072
    assert step_s == pytest.approx(read_bytes / (3.35e12 * Assumed().bandwidth_efficiency) + Assumed().overhead_s)


def test_a_long_prefill_is_arithmetic() -> None:
    step_s = Roofline(H100_80GB, LLAMA_8B).step_s(prefill(8192))
    flops = 8192 * 2 * 8.03e9 + 8192 * 8193 // 2 * 4 * 32 * 32 * 128
    assert step_s == pytest.approx(flops / (989e12 * Assumed().compute_efficiency) + Assumed().overhead_s)


def test_blocks_fill_the_memory_beside_the_weights() -> None:
    blocks = Roofline(H100_80GB, LLAMA_8B).num_blocks
    held_gib = (blocks * 16 * 131_072 + 2 * 8.03e9) / 2**30
    assert held_gib == pytest.approx(80 * 0.92 - 2, rel=1e-3)


def test_an_h200_has_the_blocks_that_vllm_found_room_for_on_one() -> None:
    """`python -m benchmarks.fit_engine --profile h200-llama-8b` on one, with vLLM 0.32.0."""
    assert Roofline(H200_141GB, LLAMA_8B).num_blocks == pytest.approx(57_382, rel=0.01)
