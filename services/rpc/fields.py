"""Reads the fields of encoded messages one by one, without decoding what is in them."""

from __future__ import annotations

from typing import Final

from services.rpc.encoding import FIXED64, LENGTH_DELIMITED, VARINT

FIXED32: Final = 5
"""Wire type of four bytes."""

MORE: Final = 128
"""Of a group of seven bits of a number: another one follows."""

MAX_SHIFT: Final = 63
"""Of the last group of seven bits of a number (protobuf encoding specification)."""

MAX_NUMBER: Final = (1 << 29) - 1
"""Of a field."""


def number(data: bytes, at: int) -> tuple[int, int]:
    """Return a base-128 number and where it ends; raises IndexError or ValueError if it ends nowhere."""
    byte = data[at]
    if byte < MORE:
        return byte, at + 1
    value = shift = 0
    while shift <= MAX_SHIFT:
        byte = data[at]
        at += 1
        value |= (byte & MORE - 1) << shift
        if byte < MORE:
            return value, at
        shift += 7
    raise ValueError("a number has no end")


def content(data: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return where the content of a field begins and ends; raises as `number`, and ValueError for a group."""
    if wire_type == LENGTH_DELIMITED:
        size, at = number(data, at)
        return at, at + size
    if wire_type == VARINT:
        return at, number(data, at)[1]
    if wire_type == FIXED64:
        return at, at + 8
    if wire_type == FIXED32:
        return at, at + 4
    raise ValueError(f"wire type {wire_type}")  # groups, which no message here has


def field_at(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the field that begins at `at`, and where its content begins and ends.

    Raises ValueError if there is none, or if it does not end within `data`.
    """
    try:
        tag, start = number(data, at)
        start, end = content(data, start, tag & 7)
    except IndexError:
        raise ValueError("a field has no end") from None
    if end > len(data):
        raise ValueError("a field has no end")
    if not 0 < tag >> 3 <= MAX_NUMBER:
        raise ValueError(f"field number {tag >> 3}")
    return tag, start, end
