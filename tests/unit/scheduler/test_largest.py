"""The largest request of each worker that does not go first."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.sharing.largest import Largest


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_it_is_that_of_a_list(seed: int) -> None:
    draw = random.Random(seed)
    largest, sizes = Largest(), {1: dict[str, int](), 2: dict[str, int]()}
    for number in range(200):
        epoch = draw.choice((1, 2))
        names = list(sizes[epoch])
        if names and draw.random() < 0.4:
            name = draw.choice(names)
            largest.ended(epoch, name)
            del sizes[epoch][name]
        elif names and draw.random() < 0.4:
            name, blocks = draw.choice(names), draw.randrange(20)
            largest.holds(epoch, name, blocks)
            sizes[epoch][name] = max(sizes[epoch][name], blocks)
        else:
            sizes[epoch][f"r{number}"] = blocks = draw.randrange(20)
            largest.began(epoch, f"r{number}", blocks)
        for each, known in sizes.items():
            assert largest.most_blocks(each) == max(known.values(), default=0)


def test_what_is_not_counted_or_gone_is_ignored() -> None:
    largest = Largest()
    largest.holds(1, "r", 5)
    largest.ended(1, "r")
    assert largest.most_blocks(1) == 0
    largest.began(1, "r", 5)
    largest.holds(1, "other", 9)
    assert largest.most_blocks(1) == 5
    largest.forget(1)
    assert largest.most_blocks(1) == 0
