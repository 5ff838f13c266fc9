"""JSON made in parts, so that a thread that makes much of it leaves the interpreter to the others.

The encoder is one call in C: until it returns no other thread runs, the event loop's neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

PART_ENTRIES = 2048
"""Entries of lists and dicts, those within others counted too, that are encoded by one call: they take it a
millisecond."""

T = TypeVar("T")

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Rows:
    """A JSON array whose entries are made while it is encoded: they are never there all at once."""

    def __init__(self, values: Iterable[Any]) -> None:
        """Have these entries, which can be gone through once."""
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        """Go through them."""
        return iter(self._values)


CONTAINERS = (dict, list, tuple, Rows)


def json_bytes(value: Any, errors: str = "strict") -> Iterator[bytes]:
    """Yield the parts of a value as JSON in UTF-8; `errors` says what becomes of lone surrogates, as for `str.encode`.

    Raises what that does.
    """
    return (part.encode("utf-8", errors) for part in json_parts(value))


def json_parts(value: Any) -> Iterator[str]:
    """Yield the parts of a value as JSON: however it is parted, it is what the encoder makes of the whole."""
    if _entries(value) <= PART_ENTRIES:
        yield encode(value)
    elif isinstance(value, dict):
        yield from _object(value)
    else:
        yield from _array(value)


def _object(fields: dict[Any, Any]) -> Iterator[str]:
    before = "{"
    for run in _runs(fields.items(), lambda field: _entries(field[1])):
        yield before
        before = ","
        if len(run) > 1:
            yield encode(dict(run))[1:-1]
        else:
            ((key, value),) = run
            yield encode({key: None})[1 : -len("null}")]
            yield from json_parts(value)
    yield "}"


def _array(values: Iterable[Any]) -> Iterator[str]:
    yield "["
    before = ""
    for run in _runs(values, _entries):
        yield before
        before = ","
        if len(run) > 1:
            yield encode(run)[1:-1]
        else:
            yield from json_parts(run[0])
    yield "]"


def _runs(items: Iterable[T], entries: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in runs of up to PART_ENTRIES, those within them counted too; one that has more is alone."""
    run: list[T] = []
    held = 0
    for item in items:
        more = 1 + entries(item)
        if run and held + more > PART_ENTRIES:
            yield run
            run, held = [], 0
        run.append(item)
        held += more
    if run:
        yield run


def _entries(value: Any) -> int:
    """Return how many entries a value has, those within others counted too, or some number beyond PART_ENTRIES."""
    entries, within = 0, [value]
    for one in within:
        if isinstance(one, CONTAINERS):
            entries += PART_ENTRIES + 1 if isinstance(one, Rows) else len(one)
            if entries > PART_ENTRIES:
                break
            within.extend(one.values() if isinstance(one, dict) else one)
    return entries
