"""JSON that is made in parts is to the byte what the encoder makes of the whole, and no part is large."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.openai import jsontext
from penstock.openai.jsontext import Rows, json_bytes

TEXT = st.text() | st.sampled_from(["\ud83d", "a\udc00b", "é\x00\u2028"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
KEYS = TEXT | st.integers() | st.booleans() | st.none() | st.floats()


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=6)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, inner, max_size=6)


def lazy(value: Any) -> Any:
    """Return the same with lists whose entries are made when they are encoded."""
    if isinstance(value, dict):
        return {key: lazy(one) for key, one in value.items()}
    return Rows(lazy(one) for one in value) if isinstance(value, list) else value


VALUES = st.recursive(LEAVES, _containers, max_leaves=30)


def entries(value: Any) -> int:
    """Count what a value has, with all that is within it."""
    if not isinstance(value, dict | list | tuple):
        return 0
    within = value.values() if isinstance(value, dict) else value
    return len(value) + sum(entries(one) for one in within)


@given(value=VALUES, most=st.integers(1, 8), errors=st.sampled_from(["strict", "backslashreplace"]))
def test_the_parts_are_the_whole(value: Any, most: int, errors: str) -> None:
    parted: list[int] = []
    encode = jsontext.encode

    def noted(part: Any) -> str:
        parted.append(entries(part))
        return encode(part)

    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    with patch.object(jsontext, "PART_ENTRIES", most), patch.object(jsontext, "encode", noted):
        try:
            expected = whole.encode("utf-8", errors)
        except UnicodeEncodeError:
            with pytest.raises(UnicodeEncodeError):
                b"".join(json_bytes(value, errors))
            return
        assert b"".join(json_bytes(value, errors)) == expected
    assert max(parted) <= most
    with patch.object(jsontext, "PART_ENTRIES", most):
        assert b"".join(json_bytes(lazy(value), errors)) == expected


def test_what_is_small_is_made_at_once() -> None:
    with patch.object(jsontext, "encode", wraps=jsontext.encode) as encode:
        list(json_bytes([{"token": str(number), "bytes": [1, 2, 3]} for number in range(300)]))
    assert encode.call_count == 1
