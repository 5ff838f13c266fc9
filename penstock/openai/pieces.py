"""How much a JSON text has in it, told from its bytes: parsing it makes objects of many times its size.

16 MiB of `[],` are parsed in seconds, for which a loop serves nobody else, into 400 MB; all this takes a tenth of that,
and a small part of it where the bytes are those of a long text.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.openai.limits import MAX_COMMAS, MAX_OBJECTS


class Pieces(NamedTuple):
    """What a parser would make objects of; what strings hold is not counted."""

    objects: int
    """Strings and opening brackets."""
    commas: int


def pieces_of(data: bytes, most: int) -> Pieces:
    """Count the pieces of a JSON text: all that stand before what is no JSON, if it is none.

    With more than `most` strings nothing else is counted.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins and ends strings
    parts = data.split(b'"', 2 * most + 1)
    strings = len(parts) // 2
    if strings > most:
        return Pieces(strings, 0)
    outside = b"".join(parts[::2])
    return Pieces(strings + outside.count(b"[") + outside.count(b"{"), outside.count(b","))


def excess(data: bytes | bytearray) -> str:
    """Return what of a body there is too much of, to be told; empty if it may be parsed."""
    if len(data) <= MAX_OBJECTS:
        return ""
    objects, commas = pieces_of(bytes(data), MAX_OBJECTS)
    if objects > MAX_OBJECTS:
        return f"more than {MAX_OBJECTS} strings and opening brackets"
    return f"more than {MAX_COMMAS} commas between values" if commas > MAX_COMMAS else ""
