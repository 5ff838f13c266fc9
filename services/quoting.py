"""What somebody gave, as a line about it quotes it."""

from __future__ import annotations

from typing import Any

MOST_LETTERS = 120
"""Of a quotation: a line of a terminal, about."""

CUT = "..."


def shown(value: Any) -> str:
    """Return `value` for an error line, cut to a readable length."""
    try:
        text = repr(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - len(CUT)] + CUT
