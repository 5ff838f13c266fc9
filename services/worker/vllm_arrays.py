"""Array sizes in a client's JSON schema, brought down to what a run can write, before a compiler takes them literally.

llguidance, to which vLLM turns for what xgrammar does not compile, makes a rule for each item that an array must or may
have: some 80 bytes for one that it must have, a kilobyte for one that it may. 46 bytes of schema took all memory of the
worker, and then that of the next one.
"""

from __future__ import annotations

import json
from typing import Any

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
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            if _exceeds(node.get("minItems"), most):
                node["minItems"] = most
                changed = True
            if _exceeds(node.get("maxItems"), most):
                del node["maxItems"]
                changed = True
            items += sum(_size(node.get(keyword)) for keyword in ("minItems", "maxItems"))
            left += [value for keyword, value in node.items() if keyword not in VALUES]
    return changed, items


def _exceeds(count: Any, most: int) -> bool:
    return isinstance(count, int | float) and count > most


def _size(count: Any) -> int:
    return int(count) if _exceeds(count, 0) else 0
