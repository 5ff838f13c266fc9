"""Protobuf's wire format, as far as it takes to put encoded messages into others without building them again.

A field of a message type and a field of bytes look alike on the wire: tag, length, content. So a payload that is
stored encoded travels on as it is, and a frame of encoded messages is their concatenation. Tags come from the
descriptors; nothing here knows a field number.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

VARINT: Final = 0
"""Wire type of numbers (protobuf encoding specification)."""

FIXED64: Final = 1
"""Wire type of eight bytes, little-endian."""

LENGTH_DELIMITED: Final = 2
"""Wire type of what has its length before it."""

_TWO_GROUPS: Final = 1 << 14
"""Numbers below have at most two groups of seven bits. They and the groups of larger ones are looked up, not computed:
every field of every message that is put together here takes one or two."""

_SHORT: Final = tuple([bytes((n & 127 | 128, n >> 7) if n > 127 else (n,)) for n in range(_TWO_GROUPS)])
"""Encoding of numbers below."""

_MORE: Final = tuple([bytes((n & 127 | 128, n >> 7 | 128)) for n in range(_TWO_GROUPS)])
"""Two groups that others follow."""


def varint(value: int) -> bytes:
    """Return the base-128 encoding of `value`; raises ValueError if it is negative."""
    if 0 <= value < _TWO_GROUPS:
        return _SHORT[value]
    if value < 0:
        raise ValueError(f"{value} is negative")
    return _MORE[value & _TWO_GROUPS - 1] + varint(value >> 14)


def length_tag(kind: type[Message], field: str) -> bytes:
    """Return the tag of a field that holds a message, text or bytes."""
    return varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | LENGTH_DELIMITED)


def number_tag(kind: type[Message], field: str) -> bytes:
    """Return the tag of a field that holds an unsigned or non-negative integer, an enum or a bool."""
    return varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | VARINT)


def fixed_tag(kind: type[Message], field: str) -> bytes:
    """Return the tag of a field that holds a fixed64."""
    return varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | FIXED64)


def number_field(tag: bytes, value: int) -> bytes:
    """Return a field with a number that is not negative, or a bool; nothing for 0, which is what is read then.

    Short messages that every request takes are put together of such fields: to make and encode a message of protobuf's
    takes two or three times as long.
    """
    return tag + varint(value) if value else b""


def signed(value: int) -> int:
    """Return what a sint32 is encoded as: small numbers of either sign are small."""
    return value << 1 ^ value >> 31


def text_field(tag: bytes, value: str) -> bytes:
    """Return a field with a text; nothing for an empty one."""
    return wrapped(tag, value.encode()) if value else b""


def wrapped(tag: bytes, content: bytes) -> bytes:
    """Return a field with encoded content."""
    return tag + varint(len(content)) + content


def encoded(message: Message | bytes) -> bytes:
    """Return the encoding of a message that may be encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()
