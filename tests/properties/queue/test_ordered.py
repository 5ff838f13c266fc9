"""What is kept in order against a plain set, over many chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.queue.core.ordered import CHUNK, Ordered
from tests.support.effort import examples

MOST = 6 * CHUNK

DEED = st.tuples(
    st.sampled_from(["add", "add", "discard"]), st.integers(0, MOST), st.integers(1, MOST), st.sampled_from([1, -1, 7])
)
"""Values from a first one on, so many of them, with so much between two."""


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(DEED, max_size=8))
def test_the_first_is_the_least_of_what_is_there(deeds: list[tuple[str, int, int, int]]) -> None:
    ordered: Ordered[int] = Ordered()
    plain: set[int] = set()
    for deed, first, count, step in deeds:
        for value in range(first, first + step * count, step):
            if deed == "discard":
                ordered.discard(value)
                plain.discard(value)
            elif value not in plain:
                ordered.add(value)
                plain.add(value)
        assert bool(ordered) == bool(plain)
        assert not plain or ordered.first() == min(plain)
    for value in sorted(plain):
        assert ordered.first() == value
        ordered.discard(value)
    assert not ordered
