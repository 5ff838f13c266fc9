"""How many blocks a request may need."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.core.admission.estimate import (
    least_blocks,
    need_blocks,
    prompt_bound_tokens,
    rejection,
    window_blocks,
    worst_case_blocks,
)
from services.scheduler.core.admission.lengths import limit_tokens
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.messages import EngineShape
from tests.support.scheduling import announced

SHAPE = EngineShape(255, 32, 2048, 64)
BYTES = SHAPE.replace(byte_bounded_tokenizer=True, special_tokens=2)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (2047, 64)])
def test_need(tokens: int, blocks: int) -> None:
    assert need_blocks(tokens, 32) == blocks


@pytest.mark.parametrize(
    ("shape", "fields", "bound"),
    [
        (SHAPE, {"prompt_tokens": 100}, 100),
        (SHAPE, {"prompt_bytes": 10}, 2048 - 50),
        (BYTES, {"prompt_bytes": 10}, 12),
        (BYTES, {"prompt_bytes": 10, "chat": True}, 2048 - 50),
        (BYTES, {"prompt_tokens": 100, "prompt_bytes": 10}, 100),
        (SHAPE, {"prompt_bytes": 10, "max_tokens": 0}, 2047),
        (SHAPE, {"prompt_bytes": 10, "max_tokens": 2048}, 1),
        (SHAPE, {"prompt_bytes": 10, "max_tokens": 9999}, 1),
    ],
)
def test_the_bound_of_a_prompt_is_exact_proven_or_the_rest_of_the_window(
    shape: EngineShape, fields: dict[str, Any], bound: int
) -> None:
    request = announced("r", "batch", 0).replace(**{"max_tokens": 50, **fields})
    assert prompt_bound_tokens(request, shape) == bound


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"prompt_tokens": 100, "max_tokens": 29}, 4),  # 128 tokens at the peak: the last one is never written
        ({"prompt_tokens": 100, "max_tokens": 30}, 5),
        ({"prompt_tokens": 1, "max_tokens": 1}, 1),
        ({"prompt_tokens": 100, "max_tokens": 0}, 64),
        ({"prompt_tokens": 2000, "max_tokens": 500}, 64),
        ({"prompt_tokens": 100, "max_tokens": 29, "n": 3}, 12),
        ({"prompt_bytes": 5, "max_tokens": 10}, 64),
    ],
)
def test_the_worst_case(fields: dict[str, Any], blocks: int) -> None:
    assert worst_case_blocks(announced("r", "batch", 0).replace(**fields), SHAPE) == blocks


def test_no_completion_is_booked_more_than_it_can_hold() -> None:
    drafting = SHAPE.replace(lookahead_tokens=40, most_blocks=64)
    assert worst_case_blocks(announced("r", "batch", 0, prompt_tokens=100, max_tokens=0, n=2), drafting) == 128
    assert worst_case_blocks(announced("r", "batch", 0, prompt_tokens=100, max_tokens=29), drafting) == 6
    assert window_blocks(announced("r", "batch", 0), drafting) == 64
    request = announced("r", "batch", 0, prompt_tokens=2000, max_tokens=48)
    assert rejection(request, [drafting.replace(capacity_blocks=64)]) is None
    assert rejection(request, [drafting.replace(capacity_blocks=64, most_blocks=0)]) is not None


def test_lookahead_and_bytes_count() -> None:
    request = announced("r", "batch", 0, prompt_tokens=100, max_tokens=29)
    assert worst_case_blocks(request, SHAPE.replace(lookahead_tokens=1)) == 5
    text = announced("r", "batch", 0, prompt_tokens=0, prompt_bytes=126, max_tokens=1)
    assert worst_case_blocks(text, BYTES) == 4


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 300), ({"max_tokens": 50}, 50), ({"max_tokens": 900}, 700), ({"prompt_tokens": 2040}, 8)],
)
def test_a_forecast_ends_where_the_model_or_the_request_says(fields: dict[str, Any], limit: int) -> None:
    shape = SHAPE.replace(default_max_tokens=300, ceiling_max_tokens=700)
    request = announced("r", "batch", 0).replace(**{"prompt_tokens": 100, "max_tokens": 0, **fields})
    assert limit_tokens(request, shape, request.prompt_tokens) == limit


def test_the_policies_book_what_their_names_say() -> None:
    request = announced("r", "batch", 0, prompt_tokens=100, max_tokens=29, n=2)
    booked = {name: policy.booking_blocks(request, SHAPE) for name, policy in POLICIES.items()}
    assert booked == {"worst-case": 128, "tokenizer-ack": 8, "virtual-channels": 8, "predictive": 8}
    assert window_blocks(request, SHAPE) == 128
    assert [policy.settles for policy in POLICIES.values()] == [False, True, True, True]
    assert [policy.channels_apart for policy in POLICIES.values()] == [False, False, True, True]


def test_what_follows_its_output_is_booked_with_its_states_up_to_the_window() -> None:
    states = 3
    hybrid = SHAPE.replace(lookahead_tokens=4 + states * 32, most_blocks=64 + states)
    for prompt, blocks in ((30, 2), (1000, 32), (2040, 64)):
        request = announced("r", "batch", 0, prompt_tokens=prompt, max_tokens=8)
        assert POLICIES["predictive"].booking_blocks(request, hybrid) == blocks + states


def test_a_prompt_longer_than_every_window_is_rejected_with_both_numbers() -> None:
    request = announced("r", "batch", 0, prompt_tokens=2048, max_tokens=1)
    reject = rejection(request, [SHAPE, SHAPE.replace(max_model_len=1024)])
    assert reject is not None
    assert (reject.code, reject.param) == ("context_length_exceeded", "prompt")
    assert "2048 tokens" in reject.message
    assert rejection(request, [SHAPE, SHAPE.replace(max_model_len=4096)]) is None


def test_a_request_larger_than_every_pool_is_rejected_with_both_numbers() -> None:
    request = announced("r", "batch", 0, prompt_tokens=0, max_tokens=2000, n=5)
    assert least_blocks(request, SHAPE) == 5 * 63
    reject = rejection(request, [SHAPE, SHAPE.replace(capacity_blocks=100)])
    assert reject is not None
    assert (reject.code, reject.param) == ("pool_too_small", "sampling.n")
    assert "315" in reject.message
    assert "255" in reject.message


CHAT = announced("r", "batch", 0).replace(prompt_tokens=0, prompt_bytes=2000, chat=True, max_tokens=0, n=4)
LONG = EngineShape(20_000, 16, 131_072, 64)


@pytest.mark.parametrize(
    ("shape", "max_tokens", "blocks"),
    [
        (LONG, 0, 4 * 8192),  # the worker has said nothing of its model
        (LONG.replace(default_max_tokens=2048), 0, 4 * 128),
        (LONG.replace(ceiling_max_tokens=2048), 0, 4 * 128),
        (LONG.replace(default_max_tokens=2048, ceiling_max_tokens=1024), 0, 4 * 64),
        (LONG.replace(default_max_tokens=2048), 100_000, 4 * 6250),
        (LONG.replace(ceiling_max_tokens=2048), 100_000, 4 * 128),
        (LONG.replace(default_max_tokens=1 << 20, ceiling_max_tokens=1 << 20), 0, 4 * 8192),
    ],
)
def test_an_output_is_as_long_as_the_models_own_numbers_let_it(
    shape: EngineShape, max_tokens: int, blocks: int
) -> None:
    request = CHAT.replace(max_tokens=max_tokens)
    assert least_blocks(request, shape) == blocks
    assert (rejection(request, [shape]) is None) == (blocks <= shape.capacity_blocks)


def test_a_prompt_nobody_has_counted_is_booked_at_the_window_whatever_the_models_own_numbers() -> None:
    for max_tokens in (0, 100, 100_000):
        for shape in (LONG, LONG.replace(default_max_tokens=2048), LONG.replace(ceiling_max_tokens=50)):
            assert worst_case_blocks(CHAT.replace(max_tokens=max_tokens), shape) == 4 * 8192
    known = CHAT.replace(prompt_tokens=1000)
    assert worst_case_blocks(known, LONG.replace(default_max_tokens=2048)) == 4 * 191


def test_without_a_worker_of_the_model_nothing_is_rejected() -> None:
    assert rejection(announced("r", "batch", 0, prompt_tokens=10**6), []) is None
