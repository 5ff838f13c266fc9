"""Half surrogate pairs are found wherever JSON can put them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.openai.speakable import unspeakable_field

HALF = "\ud83d"


def found(fields: dict[str, Any]) -> str | None:
    """Return the field that is named of `fields`, sent as JSON."""
    data = json.dumps(fields)
    return unspeakable_field(data.encode(), json.loads(data))


@pytest.mark.parametrize("value", [HALF, [1, HALF], {"x": {"y": HALF}}, {HALF: None}, [[], [{"x": [HALF]}], 2.5]])
def test_the_field_that_holds_half_a_pair_is_named(value: Any) -> None:
    assert found({"good": "\N{GRINNING FACE}", "bad": value, "worse": HALF}) == "bad"
    assert found({"good": ["\N{GRINNING FACE}", {"\N{GRINNING FACE}": [None, True, 1]}], "text": r"\ud83d"}) is None


def test_a_name_that_holds_one_is_spelt_out() -> None:
    assert found({"good": 1, f"a{HALF}": 1}) == r"a\ud83d"


def test_values_may_be_nested_however_deeply() -> None:
    value: Any = HALF
    for _ in range(100_000):
        value = [value]
    assert unspeakable_field(rb"\ud83d", {"good": [], "bad": value}) == "bad"
