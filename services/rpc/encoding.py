"""Protobuf's wire format, as far as it takes to put encoded messages into others without building them again.

A field of a message type and a field of bytes look alike on the wire: tag, length, content. So a payload that is
stored encoded travels on as it is, and a frame of encoded messages is their concatenation. Tags come from the
descriptors; nothing here knows a field number.
"""

from __future__ import annotations

from google.protobuf.message import Message

VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types (protobuf encoding specification)."""

_ONE_BYTE = tuple(bytes((n,)) for n in range(128))


def varint(value: int) -> bytes:
    """Return the base-128 encoding of `value`, which must not be negative."""
    if value < 128:
        return _ONE_BYTE[value]
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def length_tag(kind: type[Message], field: str) -> bytes:
    """Return the tag of a field that holds a message, text or bytes."""
    return varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | LENGTH_DELIMITED)


def number_tag(kind: type[Message], field: str) -> bytes:
    """Return the tag of a field that holds an unsigned or non-negative integer, an enum or a bool."""
    return varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | VARINT)


def wrapped(tag: bytes, content: bytes) -> bytes:
    """Return a field with encoded content."""
    size = len(content)
    return tag + (_ONE_BYTE[size] if size < 128 else varint(size)) + content


def encoded(message: Message | bytes) -> bytes:
    """Return the encoding of a message that may be encoded already."""
    return message if isinstance(message, bytes) else message.SerializeToString()
