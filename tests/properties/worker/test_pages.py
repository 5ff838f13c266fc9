"""Pages of a file in any order of taking and giving back: no page has two takers, and the file is no longer than it
must be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.worker.pages import Pages

STEPS = st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1, exclude_max=True)), max_size=60)
"""How many pages to take; or, as a fraction of them, which of the takers gives its own back."""


def walk(steps: list[int | float], check: Callable[[Pages, list[list[range]]], None]) -> None:
    """Go through the steps; show `check` the pages and what is taken after each."""
    pages, takers = Pages(), list[list[range]]()
    for step in steps:
        if isinstance(step, int):
            takers.append(pages.take(step))
            assert sum(len(run) for run in takers[-1]) == step
        elif takers:
            pages.give_back(takers.pop(int(step * len(takers))))
        check(pages, takers)
    for taken in takers:
        pages.give_back(taken)
    assert len(pages) == 0


def numbers(takers: list[list[range]]) -> list[int]:
    """Return the pages that are taken."""
    return [page for taken in takers for run in taken for page in run]


@given(STEPS)
def test_no_page_has_two_takers_and_the_last_is_taken(steps: list[int | float]) -> None:
    def check(pages: Pages, takers: list[list[range]]) -> None:
        taken = numbers(takers)
        assert len(taken) == len(set(taken))
        assert len(pages) == max(taken, default=-1) + 1

    walk(steps, check)


@given(STEPS)
def test_there_are_never_more_pages_than_were_taken_at_once(steps: list[int | float]) -> None:
    most = 0

    def check(pages: Pages, takers: list[list[range]]) -> None:
        nonlocal most
        most = max(most, len(numbers(takers)))
        assert len(pages) <= most

    walk(steps, check)


@given(STEPS, st.integers(1, 9))
def test_the_lowest_free_pages_are_taken_in_as_few_runs_as_they_lie_in(steps: list[int | float], count: int) -> None:
    def check(pages: Pages, takers: list[list[range]]) -> None:
        taken = set(numbers(takers))
        runs = pages.take(count)
        lowest = [page for page in range(len(taken) + count) if page not in taken][:count]
        assert numbers([runs]) == lowest
        assert all(left.stop < right.start for left, right in pairwise(runs))
        pages.give_back(runs)

    walk(steps, check)
