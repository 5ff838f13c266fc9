"""How much `make test` tries: what takes longer has targets of its own, which CI runs."""

from __future__ import annotations

import os
from typing import Any

import pytest

LONG = "LONG_TESTS" in os.environ
"""Whether tests marked `long` run, as in `make test-long` and `make test-compiled`."""


def examples(whole: int) -> int:
    """Return how many examples a property test tries: a third of them in `make test`."""
    return whole if LONG else -(-whole // 3)


def long(*values: Any) -> Any:
    """Return the parameters of a test that is marked `long` with these ones."""
    return pytest.param(*values, marks=pytest.mark.long)
