"""Names the field for which a message cannot be decoded: protobuf says of all its bytes that something is wrong.

Nothing of it is done unless the decoder has refused the bytes. Each part is given to the decoder alone, and only the
one that it refuses is looked into.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from penstock.openai.speakable import UNSPEAKABLE
from services.rpc.encoding import LENGTH_DELIMITED
from services.rpc.fields import field_at

MOST_FIELDS: Final = 16_384
"""Of one frame that are looked at: a tenth of a second at the worst. What is wrong behind them is named by the message
it is in."""

SURROGATES: Final = b"\xed"
HALVES: Final = range(0xA0, 0xC0)
"""First byte of a half surrogate pair that somebody has written as if it were a character, and the second ones."""

MOST_DEPTH: Final = 16
"""Messages within one another into which one looks: none that means well has more, and one that repeats itself in
itself may have millions."""


class Fault(NamedTuple):
    """What is wrong, and where."""

    path: str
    """Of the field, "requests[3].text"; empty for the message as a whole."""
    text: str


class Search:
    """Looks for what is wrong with one frame; what it looks at is bounded in all."""

    def __init__(self, most: int = MOST_FIELDS) -> None:
        """Look at `most` fields at most."""
        self._most = self._left = most

    def fault(self, kind: Descriptor, data: bytes, path: str = "") -> Fault:
        """Return what is wrong with `data`, the message at `path`, which cannot be decoded as one of `kind`."""
        places: dict[int, int] = {}
        at = 0
        while at < len(data):
            self._left -= 1
            if self._left < 0:
                return Fault(path, f"cannot be decoded; why is not among the {self._most} fields that are looked at")
            try:
                tag, start, end = field_at(data, at)
            except ValueError as error:
                return Fault(path, f"{error}, at byte {at} of {len(data)}")
            field = kind.fields_by_number.get(tag >> 3)
            if field is not None and tag & 7 == LENGTH_DELIMITED:
                place = places[tag] = places.get(tag, -1) + 1
                name = f"{path}.{field.name}" if path else field.name
                if field.type == FieldDescriptor.TYPE_STRING or field.message_type is not None:
                    found = self._fault_in(field, data[start:end], f"{name}[{place}]" if field.is_repeated else name)
                    if found is not None:
                        return found
                elif not _is_one(kind, data[at:end]):  # as the only field of what it is in
                    return Fault(name, "is no list of numbers")
            at = end
        return Fault(path, "cannot be decoded")

    def _fault_in(self, field: FieldDescriptor, content: bytes, path: str) -> Fault | None:
        """Return what is wrong with a text or a message, None if nothing is."""
        if field.message_type is None:
            text = _not_utf8(content)
            return Fault(path, text) if text else None
        if _is_one(field.message_type, content):
            return None
        if path.count(".") >= MOST_DEPTH:
            return Fault(path, f"cannot be decoded; it has more than {MOST_DEPTH} messages within one another")
        return self.fault(field.message_type, content, path)


def _is_one(kind: Descriptor, data: bytes) -> bool:
    try:
        GetMessageClass(kind).FromString(data)
    except DecodeError:
        return False
    return True


def _not_utf8(content: bytes) -> str:
    """Return what is wrong with a text, nothing if it is one."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        at, size = error.start, len(content)
        is_half = content[at : at + 1] == SURROGATES and at + 1 < size and content[at + 1] in HALVES
        return f"{UNSPEAKABLE}, at byte {at} of {size}" if is_half else f"is not UTF-8 at byte {at} of {size}"
    return ""
