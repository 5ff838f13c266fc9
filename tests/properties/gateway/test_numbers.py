"""A set of line numbers says of every number what a set says, and takes a bit for each line of a batch."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batch.lines import BLOCK_NUMBERS, MAX_LINES, Numbers

NUMBERS = st.integers(0, 5) | st.integers(BLOCK_NUMBERS - 2, BLOCK_NUMBERS + 2) | st.integers(-(10**30), 10**30)


@given(put=st.lists(NUMBERS), asked=st.lists(NUMBERS))
def test_it_has_what_was_put_in(put: list[int], asked: list[int]) -> None:
    numbers = Numbers()
    for one in put:
        numbers.add(one)
    assert [one in numbers for one in put + asked] == [one in put for one in put + asked]


def test_all_lines_of_the_largest_batch_take_some_kilobytes() -> None:
    numbers = Numbers()
    for one in range(1, MAX_LINES + 1):
        numbers.add(one)
    size_bytes = sys.getsizeof(numbers._blocks)
    size_bytes += sum(sys.getsizeof(key) + sys.getsizeof(bits) for key, bits in numbers._blocks.items())
    assert size_bytes < 3 * MAX_LINES / 8
