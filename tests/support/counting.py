"""What something costs, however noisy the machine: how often methods are called meanwhile.

Nothing patches a compiled method: tests that count are left out there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Callable[[], int]:
    """Count calls of a method; return what tells how many there were since it was asked last."""
    calls, method = 0, getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return method(*arguments)

    def since() -> int:
        nonlocal calls
        found, calls = calls, 0
        return found

    monkeypatch.setattr(owner, name, counted)
    return since
