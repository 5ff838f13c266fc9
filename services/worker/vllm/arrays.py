"""Sizes in a client's JSON schema, brought down to what a run can write, before a compiler takes them literally.

llguidance, to which vLLM turns for what xgrammar does not compile, makes a rule for each item that an array must or may
have: some 80 bytes for one that it must have, a kilobyte for one that it may. 46 bytes of schema took all memory of the
worker, and then that of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.vllm.schemas import PLAIN, REFERENCES, objects, refused

ITEMS_PER_TOKEN = 8
"""More than are in a token of any vocabulary, but for those made of nothing else."""

CHARACTERS_PER_TOKEN = 256
"""More than are in a token of any vocabulary: the longest are 128 spaces."""

MOST_ITEMS = 250_000
"""Of one array, whatever a run may write: about 300 MB and a second of a compiler's time."""

MOST_ITEMS_IN_ALL = 1_000_000
"""Of all arrays of one schema: about a gigabyte and four seconds. More is refused."""

VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""

NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by names, which may be any: a property can be called `default`."""


def bound_sizes(schema: Any, max_tokens: int) -> bool:
    """Change what a schema says of the size of its arrays and texts where `max_tokens` of output cannot come so far.

    No output changes by that: an array that must be longer is not ended before the output is, and an array or a text
    that may be longer is never so long. Returns whether anything was changed. Raises RequestRefusedError for what is
    too much in all even so.
    """
    most = min((max_tokens + 1) * ITEMS_PER_TOKEN, MOST_ITEMS)
    changed, items = _bound(schema, most, (max_tokens + 1) * CHARACTERS_PER_TOKEN)
    _check_total(items)
    return changed


def check_inline_arrays(schemas: Sequence[Any]) -> None:
    """Raise RequestRefusedError for schemas in a grammar whose arrays are too much in all, as they are written."""
    _check_total(_items(schemas))


def _check_total(items: int) -> None:
    if items > MOST_ITEMS_IN_ALL:
        text = f"the arrays of the schema may have {items} items in all; at most {MOST_ITEMS_IN_ALL} can be compiled"
        raise refused(text)


def _items(values: Sequence[Any]) -> int:
    """Return the sum of all sizes anywhere in `values`; one that is beyond all bounds counts as just that."""
    return sum(int(min(size, MOST_ITEMS_IN_ALL + 1)) for node in objects(list(values)) for size in _sizes(node))


def _bound(schema: Any, most: int, longest: int) -> tuple[bool, int]:
    """Bound every array and text in `schema`, in place.

    Return whether there was one to bound, and the sum of all sizes of arrays.

    Raises RequestRefusedError if a reference might take for a schema what is none where it stands.
    """
    changed, items = False, 0
    values: list[Any] = []
    unplain = ""
    left = [(schema, False)]
    while left:
        node, named = left.pop()
        if isinstance(node, list):
            left += [(value, False) for value in node]
        elif isinstance(node, dict):
            changed = _bound_one(node, most, longest) or changed
            items += int(sum(_sizes(node)))
            unplain = unplain or _unplain_reference(node)
            for keyword, value in node.items():
                if keyword in VALUES and not named:
                    values.append(value)
                else:
                    left.append((value, keyword in NAMED and not named))
    if unplain:
        items += _hidden(values, most, unplain)
    return changed, items


def _bound_one(node: dict[str, Any], most: int, longest: int) -> bool:
    """Bound the array or the text that a schema describes, in place; return whether that changed anything."""
    too_many = _exceeds(node.get("minItems"), most)
    if too_many:
        node["minItems"] = most
    too_large = [
        name for name, bound in (("maxItems", most), ("maxLength", longest)) if _exceeds(node.get(name), bound)
    ]
    for name in too_large:
        del node[name]
    return too_many or bool(too_large)


def _unplain_reference(node: dict[str, Any]) -> str:
    """Return a reference of a schema that may lead anywhere; empty if it has none."""
    given = [node.get(keyword) for keyword in REFERENCES]
    return next((one for one in given if isinstance(one, str) and not PLAIN.fullmatch(one)), "")


def _hidden(values: list[Any], most: int, reference: str) -> int:
    """Return the sum of all sizes in `values`, which may be schemas by `reference`; raises if one is beyond `most`.

    They are not bounded: for everybody else they are values.
    """
    items = 0
    for node in objects(values):
        found = _sizes(node)
        if any(size > most for size in found):
            text = f"a value of the schema has an array of {max(found)} items; to it {reference[:99]!r} may lead"
            raise refused(text)
        items += int(sum(found))
    return items


def _exceeds(count: Any, most: int) -> bool:
    return isinstance(count, int | float) and count > most


def _sizes(node: dict[str, Any]) -> list[float]:
    given: list[Any] = [node.get(keyword) for keyword in ("minItems", "maxItems")]
    return [count for count in given if _exceeds(count, 0)]
