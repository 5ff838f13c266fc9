"""Array sizes in a client's JSON schema, brought down to what a run can write, before a compiler takes them literally.

llguidance, to which vLLM turns for what xgrammar does not compile, makes a rule for each item that an array must or may
have: some 80 bytes for one that it must have, a kilobyte for one that it may. 46 bytes of schema took all memory of the
worker, and then that of the next one.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from vllm.sampling_params import StructuredOutputsParams

from services.worker.engine import RequestRefusedError

ITEMS_PER_TOKEN = 8
"""More than are in a token of any vocabulary, but for those made of nothing else."""

MOST_ITEMS = 250_000
"""Of one array, whatever a run may write: about 300 MB and a second of a compiler's time."""

MOST_ITEMS_IN_ALL = 1_000_000
"""Of all arrays of one schema: about a gigabyte and four seconds. More is refused."""

VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""

NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose values are schemas by names, which may be any: a property can be called `default`."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def bound_arrays(wanted: StructuredOutputsParams, max_tokens: int) -> None:
    """Change what a schema says of the size of its arrays where `max_tokens` of output cannot come so far.

    No output changes by that: an array that must be longer is not ended before the output is, and one that may be
    longer is never so long. Raises RequestRefusedError for what is too much in all even so.
    """
    most = min((max_tokens + 1) * ITEMS_PER_TOKEN, MOST_ITEMS)
    for name in ("json", "structural_tag"):
        given = getattr(wanted, name)
        if given is None:
            continue
        try:
            schema = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            continue  # vLLM's own check says what is wrong with it
        changed, items = _bound(schema, most)
        if items > MOST_ITEMS_IN_ALL:
            text = (
                f"the arrays of the schema may have {items} items in all; at most {MOST_ITEMS_IN_ALL} can be compiled"
            )
            raise RequestRefusedError("invalid_parameter", text, "sampling.structured_outputs")
        if changed:
            setattr(wanted, name, json.dumps(schema) if isinstance(given, str) else schema)


def _bound(schema: Any, most: int) -> tuple[bool, int]:
    """Bound every array in `schema`, in place; return whether there was one to bound, and the sum of all sizes."""
    changed, items = False, 0
    left = [(schema, False)]
    while left:
        node, named = left.pop()
        if isinstance(node, list):
            left += [(value, False) for value in node]
        elif isinstance(node, dict):
            changed = _bound_one(node, most) or changed
            items += sum(_size(node.get(keyword)) for keyword in ("minItems", "maxItems"))
            left += [(value, keyword in NAMED and not named) for keyword, value in _schemas_of(node, named)]
    return changed, items


def _bound_one(node: dict[str, Any], most: int) -> bool:
    """Bound the array that a schema describes, in place; return whether that changed anything."""
    too_many, too_large = _exceeds(node.get("minItems"), most), _exceeds(node.get("maxItems"), most)
    if too_many:
        node["minItems"] = most
    if too_large:
        del node["maxItems"]
    return too_many or too_large


def _schemas_of(node: dict[str, Any], named: bool) -> list[tuple[str, Any]]:
    """Return what may be a schema in a schema, or, if they are `named`, in schemas by their names."""
    for keyword in REFERENCES:
        _check_reference(node.get(keyword))
    return [(keyword, value) for keyword, value in node.items() if named or keyword not in VALUES]


def _check_reference(reference: Any) -> None:
    """Raise RequestRefusedError if a reference takes for a schema what is none where it stands, and so is not bounded.

    It would lead into a value, or to schemas with their names as a whole.
    """
    if not isinstance(reference, str):
        return
    named = False
    for part in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not named and part in VALUES:
            text = f"a reference of the schema leads into {part!r}, where there is no schema: {reference[:100]!r}"
            raise RequestRefusedError("invalid_parameter", text, "sampling.structured_outputs")
        named = part in NAMED and not named
    if named:
        text = f"a reference of the schema leads to {part!r} and to none of the schemas in it: {reference[:100]!r}"
        raise RequestRefusedError("invalid_parameter", text, "sampling.structured_outputs")


def _exceeds(count: Any, most: int) -> bool:
    return isinstance(count, int | float) and count > most


def _size(count: Any) -> int:
    return int(count) if _exceeds(count, 0) else 0
