"""How much of a client's grammar a compiler can take in a second or two, while all other requests that need it wait.

Times are those of one core, of xgrammar 0.2.8 with a small vocabulary of 2,048 tokens and a large one of 131,072; they
grow with the square of what is counted, or faster. An engine core uses up to eight cores for the larger part of it.
`pytest --durations=0 tests/contract/worker/test_vllm_structured.py` shows those of the bounds with the small one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from services.worker.vllm.schemas import objects, refused

MOST_BYTES = 64 * 1024
"""Of choices, of a regex or a grammar, and of what a schema says of the output: values, names of properties, patterns.
A constant or an enumeration of 100 KB takes 2 s, one of 1 MB more than 40 s."""

MOST_SCHEMA_BYTES = 256 * 1024
"""Of a whole schema or structural tag, what describes it and is not compiled as well: to look at one takes up to half a
second of the worker's event loop."""

MOST_ALTERNATIVES = 10_000
"""Choices, values of enumerations and alternatives of a regex or a grammar, in all; some 0.1 s where they are short."""

MOST_BRANCHES = 2000
"""Members of `anyOf` and the like, in all: 2,000 that are arrays take 2 s with the large vocabulary."""

MOST_PROPERTIES = 500
"""Of one object, and items of one `prefixItems`. 1,000 that may be left out take 0.3 s with the small vocabulary and
2 s with the large one, and 3,000 take 5 s with the small one."""

MOST_PROPERTIES_IN_ALL = 10_000
"""Of all objects and `prefixItems` of a schema: 3,000 in objects of 20 take 0.8 s with the large vocabulary."""

MOST_OPTIONAL = 128
"""Parts of one regex, pattern or grammar that may be left out. 100 in a row take 0.1 s with the small vocabulary and
3 s with the large one, 300 take 1.5 s with the small one, and 1,000, in 2 KB, more than 25 s."""

MOST_REPEATED = 250
"""Stars and question marks of one regex, pattern or grammar: 100 stars in a row take 0.5 s with the large vocabulary,
500 more than 12 s, and 2,000 take 0.8 s with the small one."""

IN_ALL = 2
"""So many times as in one pattern both may be in all patterns of a schema."""

MOST_STATES = 2500
"""Of an object, properties that may be left out times the number of which it must have, or may: at 5,000 it takes
0.6 s, and at 125,000 more than 30 s."""

VALUES = ("enum", "type")
BRANCHES = ("anyOf", "oneOf", "allOf", "elements", "tags", "structures")
"""Keywords whose values have members that are compiled one by one; the last three are those of structural tags."""

MEMBERS = ("properties", "patternProperties", "prefixItems", "elements")
"""Keywords whose values are what an object or an array has, one after another."""

COUNTS = ("minProperties", "maxProperties")

OPTIONAL = re.compile(r"\?|\|\s*\)|\((?:\?:)?\s*\||\|\s*\||\{\s*0*\s*,|\"\"|''")
"""What makes a part optional: a question mark, a count that begins at nothing, and an alternative that is empty."""

REPEATED = re.compile(r"[?*]")

ESCAPED = re.compile(r"\\.", re.DOTALL)


class Count:
    """What the schemas of one request have of everything that is bounded."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._bytes = self._values = self._branches = self._members = self._optional = self._repeated = 0

    def add(self, schema: Any) -> None:
        """Count a schema, its values as if they were schemas too. Raises RequestRefusedError."""
        for node in objects(schema):
            self._add_lists(node)
            self._add_members(node)
            pattern = node.get("pattern")
            if isinstance(pattern, str):
                self._add_pattern(pattern, "a pattern of the schema")
        _refuse_beyond(MOST_BYTES, self._bytes, "the values, names and patterns of the schema have {} bytes in all")
        _refuse_beyond(MOST_ALTERNATIVES, self._values, "the enumerations of the schema have {} values in all")
        _refuse_beyond(MOST_BRANCHES, self._branches, "the schema has {} members of anyOf and the like in all")
        _refuse_beyond(MOST_PROPERTIES_IN_ALL, self._members, "the schema has {} properties and prefixItems in all")
        text = "the patterns of the schema have {} parts in all that may be left out"
        _refuse_beyond(MOST_OPTIONAL * IN_ALL, self._optional, text)
        _refuse_beyond(MOST_REPEATED * IN_ALL, self._repeated, "the patterns of the schema have {} quantifiers in all")

    def _add_lists(self, node: dict[str, Any]) -> None:
        self._values += _members(node, VALUES)
        self._branches += _members(node, BRANCHES)
        values = [node[name] for name in ("enum", "const") if name in node]
        self._bytes += sum(_bytes(json.dumps(value, ensure_ascii=False)) for value in values)

    def _add_members(self, node: dict[str, Any]) -> None:
        for keyword in MEMBERS:
            members = node.get(keyword)
            if not isinstance(members, dict | list):
                continue
            _refuse_beyond(MOST_PROPERTIES, len(members), f"a part of the schema has {{}} {keyword}")
            self._members += len(members)
            if isinstance(members, dict):
                self._bytes += sum(map(_bytes, members))
                _check_states(len(members), node)
            if keyword == "patternProperties":
                for name in members:
                    self._add_pattern(str(name), "a name in patternProperties")

    def _add_pattern(self, pattern: str, what: str) -> None:
        check_regex(pattern, what)
        self._bytes += _bytes(pattern)
        self._optional += _optional(pattern)
        self._repeated += _repeated(pattern)


def _check_states(members: int, node: dict[str, Any]) -> None:
    """Raise RequestRefusedError if too much is to be told apart of an object that counts its properties."""
    for keyword in COUNTS:
        count = node.get(keyword)
        if isinstance(count, int | float) and count > 0:
            counted = int(min(count, members))
            text = f"{members} properties of which {keyword} counts {counted}: {{}} states"
            _refuse_beyond(MOST_STATES, members * counted, text)


def check_size(text: str, name: str) -> None:
    """Raise RequestRefusedError if a schema or a structural tag is too long to be looked at."""
    _refuse_beyond(MOST_SCHEMA_BYTES, _bytes(text), f"{name} has {{}} bytes")


def check_choices(choices: Sequence[str]) -> None:
    """Raise RequestRefusedError for too many choices, or too long ones."""
    _refuse_beyond(MOST_ALTERNATIVES, len(choices), "choice has {} alternatives")
    _refuse_beyond(MOST_BYTES, sum(map(_bytes, choices)), "choice has {} bytes in all")


def check_regex(pattern: str, what: str) -> None:
    """Raise RequestRefusedError for a regex or a grammar that is too long, or has too many alternatives or quantifiers.

    What is in its texts counts as well: readers differ in what a text is.
    """
    _refuse_beyond(MOST_BYTES, _bytes(pattern), f"{what} has {{}} bytes")
    _refuse_beyond(MOST_ALTERNATIVES, pattern.count("|"), f"{what} has {{}} alternatives")
    _refuse_beyond(MOST_OPTIONAL, _optional(pattern), f"{what} has {{}} parts that may be left out")
    _refuse_beyond(MOST_REPEATED, _repeated(pattern), f"{what} has {{}} quantifiers")


def _optional(pattern: str) -> int:
    return len(OPTIONAL.findall(ESCAPED.sub("_", pattern)))


def _repeated(pattern: str) -> int:
    return len(REPEATED.findall(ESCAPED.sub("_", pattern)))


def _members(node: dict[str, Any], keywords: Sequence[str]) -> int:
    return sum(len(found) for name in keywords if isinstance(found := node.get(name), list))


def _refuse_beyond(most: int, count: int, text: str) -> None:
    if count > most:
        raise refused(f"{text.format(count)}; at most {most} can be compiled")


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))
