"""How much a JSON text has in it is known before it is parsed, and what its strings hold does not count."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.openai.limits import MAX_COMMAS, MAX_OBJECTS
from penstock.openai.pieces import Pieces, excess, pieces_of

texts = st.text(st.sampled_from('ab\\"[{,]}:\n\N{GRINNING FACE}'))
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


def objects_in(value: Any) -> int:
    """Count the strings, lists and objects in a value, itself included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(objects_in, value.values()))
    return 1 + sum(map(objects_in, value)) if isinstance(value, list) else isinstance(value, str)


def commas_in(value: Any) -> int:
    """Count the commas between the values of a value."""
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(inner) - 1) + sum(map(commas_in, inner)) if isinstance(inner, list) else 0


@given(values, st.booleans())
def test_what_is_counted_is_what_is_parsed(value: Any, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert pieces_of(data, len(data)) == Pieces(objects_in(value), commas_in(value))


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b'["a","b","', Pieces(4, 2)),  # a string without an end is one
        (b'["a","b"]', Pieces(3, 1)),
        (b'["a","b","c"]', Pieces(4, 2)),
        (b'["a","b","c","d"]', Pieces(4, 0)),  # more than three strings: no more is counted
        (b'["a","b","c","d","e"]', Pieces(4, 0)),
    ],
)
def test_no_more_strings_are_counted_than_there_may_be(data: bytes, pieces: Pieces) -> None:
    assert pieces_of(data, 3) == pieces


def listed(value: bytes, count: int) -> bytes:
    """Return a list of `count` values."""
    return b"[" + b",".join([value] * count) + b"]"


@pytest.mark.parametrize(
    "value", [b"[]", b"{}", b'""', b'"[{,"', rb'"\\"', rb'"\""'], ids=["lists", "objects", "strings", "marks", "a", "b"]
)
def test_a_body_has_room_for_so_many_objects(value: bytes) -> None:
    assert not excess(listed(value, MAX_OBJECTS - 1))
    assert excess(listed(value, MAX_OBJECTS)) == "more than 262144 strings and opening brackets"


def test_a_body_has_room_for_so_many_commas() -> None:
    assert not excess(listed(b"7", MAX_COMMAS + 1))
    assert excess(listed(b"7", MAX_COMMAS + 2)) == "more than 1310720 commas between values"


@pytest.mark.parametrize("text", ['a, "b", [c]; {d}\\\n', "a,", '"', "\\", "[[{{"])
def test_a_text_of_any_length_is_one_string(text: str) -> None:
    assert not excess(json.dumps({"prompt": text * (16 * 2**20 // len(json.dumps(text)))}).encode())
