"""What work costs, in looks at numbers: so a test can say that it is not in proportion to what waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.modules import COMPILED

are_not_counted = pytest.mark.skipif(COMPILED, reason="compiled code takes a number for what it is")


class Looked(int):
    """A number that counts how often any of its kind is compared, or looked up."""

    looks = 0

    def __lt__(self, other: int) -> bool:
        Looked.looks += 1
        return int(self) < int(other)

    def __hash__(self) -> int:
        Looked.looks += 1
        return int(self)


def looks(work: Callable[..., object], *arguments: object) -> int:
    """Return how many looks at numbers `work` takes."""
    before = Looked.looks
    work(*arguments)
    return Looked.looks - before
