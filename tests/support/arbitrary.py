"""Hypothesis strategies for what a peer may send: any bytes, damaged messages, and sound messages that lie."""

from __future__ import annotations

import os
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import settings
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
"""Examples of each test: few in the default suite, as many as one likes in `make fuzz`."""

fuzzed = settings(max_examples=EXAMPLES, deadline=None)

MOST_DEPTH = 3

EDGES = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 16, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 10**18, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 16, 2**32, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 5, 99, -1),
}
"""Numbers at which something may happen, by kind of field."""

TEXTS = ("", "w", "r1", "r2", "batch", "interactive", "{}", "[]", '[{"role":"user","content":"x"}]', "x" * 600, "é\0")


def messages(kind: type[M], names: tuple[str, ...] = TEXTS) -> st.SearchStrategy[M]:
    """Return sound messages of `kind` with any field set to something, texts often one of `names`."""
    made: st.SearchStrategy[M] = _message(cast(Descriptor, kind.DESCRIPTOR), names, 0)
    return made


@st.composite
def _message(draw: st.DrawFn, descriptor: Descriptor, names: tuple[str, ...], depth: int) -> Any:
    message = GetMessageClass(descriptor)()
    fields = [f for f in descriptor.fields if f.message_type is None or depth < MOST_DEPTH]
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=6, unique_by=lambda f: f.name)):
        _fill(draw, message, field, names, depth)
    return message


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, names: tuple[str, ...], depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        getattr(message, field.name)[draw(_value(key, names, depth))] = draw(_value(value, names, depth))
    elif field.is_repeated:
        for item in draw(st.lists(_value(field, names, depth), max_size=3)):
            if isinstance(item, Message):
                getattr(message, field.name).add().CopyFrom(item)
            else:
                getattr(message, field.name).append(item)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(draw(_value(field, names, depth)))
    else:
        setattr(message, field.name, draw(_value(field, names, depth)))


def _value(field: FieldDescriptor, names: tuple[str, ...], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _message(field.message_type, names, depth + 1)
    if field.cpp_type in EDGES:
        return st.sampled_from(EDGES[field.cpp_type])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from((0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"))).map(
            lambda number: number if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else max(min(number, 1e30), -1e30)
        )
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return st.sampled_from(names) | st.text(max_size=8)


def frames(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """Return bytes that claim to be a message of `kind`: any at all, sound ones, and sound ones that were damaged."""
    sound = messages(kind).map(lambda message: message.SerializeToString())
    return st.binary(max_size=64) | sound | sound.flatmap(_damaged)


def _damaged(data: bytes) -> st.SearchStrategy[bytes]:
    places = st.integers(0, max(len(data) - 1, 0))
    cut = places.map(lambda at: data[:at])
    flipped = st.tuples(places, st.integers(0, 255)).map(
        lambda hit: data[: hit[0]] + bytes([hit[1]]) + data[hit[0] + 1 :]
    )
    return cut | flipped | st.binary(max_size=8).map(lambda tail: data + tail)
