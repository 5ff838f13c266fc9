"""A look at the bytes of a message before they are decoded: decoded, a few bytes can become hundreds.

It walks the fields of the message, and of the parts that are in it once, and stops at what is too much. Names are
bounded by MAX_NAME_BYTES, what repeats by a number; what is within a repeated field is looked at by whoever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from penstock.limits import MAX_NAME_BYTES
from services.rpc.encoding import LENGTH_DELIMITED
from services.rpc.fields import content, number

MAX_ENTRIES: Final = 16_384
"""Of a repeated field for which nobody has said another number: far more than any frame has."""

MAX_OTHERS: Final = 16_384
"""Fields beside those that repeat as far as is known here: a later version may have others, which are passed over."""


class TooMuchError(ValueError):
    """A message has more of something than it may; the text names the field."""


class _Field:
    """What is known of one field of a message that is looked at."""

    def __init__(self, path: str, most: int, is_name: bool, part: dict[int, _Field] | None) -> None:
        self.path = path
        self.most = most
        """Entries, if it repeats; 0 if it does not."""
        self.is_name = is_name
        self.part = part
        """The fields of a message that is there once."""


class FirstLook:
    """Looks at the messages of one type."""

    def __init__(self, kind: Descriptor, bounds: Mapping[str, int]) -> None:
        """Allow so many entries as `bounds` says by the name of a field, "SubmitBatch.requests"; else MAX_ENTRIES."""
        self._fields = _fields_of(kind, bounds, "")
        self._most = MAX_OTHERS + sum(_entries(self._fields))

    def check(self, data: bytes) -> None:
        """Raise TooMuchError if a name is too long or a field has too many entries, ValueError for what is none."""
        try:
            self._walk(data, 0, len(data), self._fields, self._most)
        except IndexError:
            raise ValueError("a field has no end") from None

    def _walk(self, data: bytes, at: int, end: int, fields: dict[int, _Field], left: int) -> int:
        """Walk over so many fields as are `left`; return how many may follow them."""
        counts: dict[int, int] = {}
        while at < end:
            left -= 1
            if left < 0:
                raise TooMuchError(f"more than {self._most} fields in one message")
            tag, at = number(data, at)
            start, at = content(data, at, tag & 7)
            if at > end:
                raise ValueError("a field has no end")
            field = fields.get(tag >> 3)
            if field is None or tag & 7 != LENGTH_DELIMITED:
                continue
            if field.part is not None:
                left = self._walk(data, start, at, field.part, left)
                continue
            count = counts[tag] = counts.get(tag, 0) + 1
            if field.most and count > field.most:
                raise TooMuchError(f"{field.path}: more than {field.most} given; at most {field.most} are allowed")
            if field.is_name and at - start > MAX_NAME_BYTES:
                raise TooMuchError(f"{field.path}: {at - start} bytes; at most {MAX_NAME_BYTES} are allowed")
        return left


def _fields_of(kind: Descriptor, bounds: Mapping[str, int], before: str) -> dict[int, _Field]:
    found = {}
    for field in kind.fields:
        path = before + field.name
        most = bounds.get(f"{kind.name}.{field.name}", MAX_ENTRIES) if field.is_repeated else 0
        whole = field.message_type if not most else None
        part = _fields_of(whole, bounds, f"{path}.") if whole is not None else None
        found[field.number] = _Field(path, most, field.type == FieldDescriptor.TYPE_STRING, part)
    return found


def _entries(fields: dict[int, _Field]) -> list[int]:
    return [each for field in fields.values() for each in (field.most, *_entries(field.part or {}))]
