"""What the scheduler books and rejects by an estimate, against what the worker finds when the prompt is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.estimate import rejection, worst_case_blocks
from services.scheduler.core.admission.forecast import Size
from services.scheduler.core.admission.predictive import Predictive
from services.scheduler.core.messages import EngineShape
from services.worker.core.sizing import Need, Sizes, covered_tokens, size
from tests.support.scheduling import announced

WINDOW_TOKENS = 512

maybe_tokens = st.none() | st.integers(1, 2 * WINDOW_TOKENS)


@given(
    prompt_tokens=st.integers(1, WINDOW_TOKENS + 1),
    known=st.booleans(),
    max_tokens=st.integers(0, 2 * WINDOW_TOKENS),
    completions=st.integers(1, 4),
    default=maybe_tokens,
    ceiling=maybe_tokens,
    capacity_blocks=st.integers(1, 200),
    lookahead=st.integers(0, 40),
    most_blocks=st.integers(0, 40),
)
def test_what_a_worker_would_run_is_never_rejected_and_never_needs_more_than_is_booked(
    prompt_tokens: int,
    known: bool,
    max_tokens: int,
    completions: int,
    default: int | None,
    ceiling: int | None,
    capacity_blocks: int,
    lookahead: int,
    most_blocks: int,
) -> None:
    sizes = Sizes(capacity_blocks, capacity_blocks, 16, WINDOW_TOKENS, lookahead, default, ceiling, most_blocks)
    need = size(sizes, prompt_tokens, max_tokens, completions)
    if not isinstance(need, Need):
        return
    shape = EngineShape(
        capacity_blocks,
        16,
        WINDOW_TOKENS,
        8,
        lookahead,
        default_max_tokens=default or 0,
        ceiling_max_tokens=ceiling or 0,
        most_blocks=most_blocks,
    )
    request = announced(
        "r", "batch", 0, prompt_tokens=prompt_tokens if known else 0, max_tokens=max_tokens, n=completions
    )
    assert rejection(request, [shape]) is None
    assert need.blocks <= worst_case_blocks(request, shape)
    covered = covered_tokens(sizes, prompt_tokens, need.blocks, completions)
    held = Size(need.blocks, prompt_tokens, 0, need.max_tokens, completions)
    assert need.max_tokens == min(covered, need.max_tokens) == Predictive._covered_tokens(held, shape)
