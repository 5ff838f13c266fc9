"""What JSON can say and UTF-8 cannot: half of a surrogate pair, such as `"\\ud83d"` alone (RFC 8259, section 8.2).

Neither protobuf nor an answer in JSON has a way to write it, so whoever sends it hears of it before anything is stored.
"""

from __future__ import annotations

from typing import Any

ESCAPES = (b"\\ud", b"\\uD")
"""How JSON writes either half; UTF-8 itself holds none."""

UNSPEAKABLE = "has half a surrogate pair, which UTF-8 cannot say"


def unspeakable_field(data: bytes | bytearray, fields: dict[str, Any]) -> str | None:
    """Return the name of the first of `fields`, parsed from `data`, that holds half a surrogate pair; else None.

    A name that holds one itself is returned with the half written out as JSON does.
    """
    if not any(escape in data for escape in ESCAPES) or _speakable(fields):
        return None
    return next((spelt(name) for name, value in fields.items() if not _speakable({name: value})), None)


def _speakable(fields: dict[str, Any]) -> bool:
    """Look at the strings one by one: to write all as JSON takes a text several times as long, and needs a stack."""
    left: list[Any] = [fields]
    try:
        while left:
            one = left.pop()
            if type(one) is str:
                one.encode()
                continue
            inner = one
            if type(one) is dict:
                left += one
                inner = one.values()
            left += [each for each in inner if type(each) in _HOLDERS]
    except UnicodeEncodeError:
        return False
    return True


_HOLDERS = frozenset({str, dict, list})
"""Types that a parser makes of what may hold a text."""


def spelt(text: str) -> str:
    """Return `text` with half surrogate pairs written out as JSON does."""
    return text.encode("utf-8", "backslashreplace").decode()
