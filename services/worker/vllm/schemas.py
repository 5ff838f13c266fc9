"""A client's JSON schema as it came: what is in it, where its references lead, and whether it says anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from services.worker.engine import RequestRefusedError

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

PLAIN = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
"""References that lead to schemas, however they are read: to the whole, or to one that is named for it. Readers differ
in the others: in what they decode, and whether an empty part counts."""


def refused(text: str) -> RequestRefusedError:
    """Return the error for structured outputs that no compiler is to be given."""
    return RequestRefusedError("invalid_parameter", text, "sampling.structured_outputs")


def refuse_beyond(most: int, count: int, text: str) -> None:
    """Raise RequestRefusedError, with both numbers, for more than can be compiled."""
    if count > most:
        raise refused(f"{text.format(count)}; at most {most} can be compiled")


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a schema, those within its values as well."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node


def references_of(schema: Any) -> set[str]:
    """Return all references of a schema, those within its values as well."""
    given = [node.get(keyword) for node in objects(schema) for keyword in REFERENCES]
    return {reference for reference in given if isinstance(reference, str)}


def check_says_something(schema: Any) -> None:
    """Raise RequestRefusedError if a schema refers to itself before it says anything: nothing could be written."""
    left, seen = [schema], {id(schema)}
    while left:
        parts = _parts(left.pop(), schema)
        if not parts:
            return
        left += [part for part in parts if id(part) not in seen]
        seen.update(map(id, parts))
    text = "the schema refers only to itself: there is nothing that could be written"
    raise refused(text)


def _parts(node: Any, schema: Any) -> list[Any]:
    """Return the schemas of which a schema is made where it stands; empty if it says something of its own."""
    if not isinstance(node, dict):
        return []
    reference = node.get("$ref")
    if isinstance(reference, str):
        return _named(reference, schema)
    given = [node.get(keyword) for keyword in ("allOf", "anyOf", "oneOf")]
    return [part for parts in given if isinstance(parts, list) for part in parts]


def _named(reference: str, schema: dict[str, Any]) -> list[Any]:
    """Return what a plain reference leads to; empty if it leads nowhere, or is not plain."""
    if not PLAIN.fullmatch(reference):
        return []
    if reference == "#":
        return [schema]
    _, keyword, name = reference.split("/")
    named = schema.get(keyword)
    return [named[name]] if isinstance(named, dict) and name in named else []
