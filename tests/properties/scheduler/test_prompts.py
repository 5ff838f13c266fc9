"""Tokens of prompts, told from their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.prompts import LEAST_PROMPTS, PROMPT_MEMORY, PromptSizes
from tests.support.scheduling import announced

REQUEST = announced("r", "batch", 0, prompt_tokens=0, prompt_bytes=10_000, model="m")


def learned(*prompts: tuple[int, int]) -> PromptSizes:
    """Return what prompts of so many bytes and tokens teach."""
    sizes = PromptSizes()
    for size, tokens in prompts:
        sizes.observe("m", REQUEST.replace(prompt_bytes=size), tokens)
    return sizes


def predicted(sizes: PromptSizes, size: int) -> int:
    return sizes.predict("m", REQUEST.replace(prompt_bytes=size), 1 << 40)


def test_a_prompt_is_predicted_from_its_bytes_once_some_were_tokenized() -> None:
    sizes = PromptSizes()
    request = REQUEST.replace(prompt_bytes=4000)
    for seen in range(LEAST_PROMPTS):
        assert sizes.predict("m", request, 4001) == 4001, f"after {seen} prompts"
        sizes.observe("m", request.replace(prompt_bytes=400), 100)
    assert sizes.predict("m", request, 4001) == pytest.approx(1000, abs=2)
    assert sizes.predict("m", request, 600) == 600, "what is proven bounds what is expected"
    assert sizes.predict("m", request.replace(chat=True), 4001) == 4001
    assert sizes.predict("m", request.replace(prompt_tokens=7), 7) == 7


@given(ratios=st.lists(st.floats(0.05, 1), min_size=20, max_size=300))
def test_most_prompts_fit_their_prediction(ratios: list[float]) -> None:
    counts = [int(ratio * 10_000) for ratio in ratios]
    most = predicted(learned(*((10_000, tokens) for tokens in counts[:PROMPT_MEMORY])), 10_000)
    # Chebyshev: at most a quarter lies more than two deviations off the mean.
    assert sum(tokens > most for tokens in counts[:PROMPT_MEMORY]) <= len(ratios) / 4


@given(
    before=st.integers(0, 200),
    bytes_per_token=st.integers(2, 8),
    counts=st.lists(st.integers(1, 20_000), min_size=LEAST_PROMPTS, max_size=60),
    wanted=st.integers(1, 20_000),
)
def test_what_a_template_adds_is_told_apart_from_the_text(
    before: int, bytes_per_token: int, counts: list[int], wanted: int
) -> None:
    sizes = learned(*((count * bytes_per_token, before + count) for count in counts))
    if len(set(counts)) > 1:
        assert predicted(sizes, wanted * bytes_per_token) == pytest.approx(before + wanted, rel=1e-3, abs=2)
    else:  # one size shows no line: every prompt is taken for its like
        assert predicted(sizes, counts[0] * bytes_per_token) == pytest.approx(before + counts[0], abs=2)


@given(short=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=20), place=st.integers(0, 40))
def test_a_few_letters_say_nothing_of_pages(short: list[tuple[int, int]], place: int) -> None:
    pages = [(4000 + 40 * index, 1000 + 10 * index) for index in range(40)]
    sizes = learned(*pages[:place], *short, *pages[place:])
    assert predicted(sizes, 8000) == pytest.approx(2000, rel=0.15)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 1 << 24), st.integers(1, 1 << 24)), min_size=LEAST_PROMPTS, max_size=40),
    wanted=st.integers(1, 1 << 24),
)
def test_any_prompts_leave_a_prediction_that_is_a_number_of_tokens(prompts: list[tuple[int, int]], wanted: int) -> None:
    assert predicted(learned(*prompts), wanted) >= 1
