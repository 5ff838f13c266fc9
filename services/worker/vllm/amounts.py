"""How much of a client's grammar a compiler can take in a second or two, while all other requests that need it wait.

Times are those of one core, of xgrammar 0.2.8 with a small vocabulary of 2,048 tokens and a large one of 131,072; they
grow with the square of what is counted, or faster. An engine core uses up to eight cores for the larger part of it.
`pytest --durations=0 tests/contract/worker/test_vllm_structured.py` shows those of the bounds with the small one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from services.worker.vllm.regexes import (
    LONGEST,
    MOST_ALTERNATIVES,
    MOST_BYTES,
    MOST_COUNTED_SQUARES,
    MOST_LENGTHS,
    MOST_OPTIONAL,
    MOST_REPEATED,
    check_regex,
    counted_squares,
    length,
    optional,
    repeated,
    size,
)
from services.worker.vllm.schemas import objects, refuse_beyond

MOST_BYTES_IN_ALL = 192 * 1024
"""Of what a schema says of the output, but for names: three constants of MOST_BYTES take 8 s with the large vocabulary,
two seconds of eight cores, and 200 enumerations of 30 values each less than one. All names of properties together are
within MOST_BYTES: 500 of 120 bytes in one object take 8 s, and of 380 bytes 29 s and 2 GB."""

MOST_SCHEMA_BYTES = 256 * 1024
"""Of a whole schema or structural tag, what describes it and is not compiled as well: to look at one takes up to a
third of a second of the worker's event loop."""

MOST_NODES = 15_000
"""Objects and arrays of a schema or structural tag, which are what looking at one takes its time for: 30,000 take up to
half a second. Those of 256 KiB that say something have fewer."""

MOST_NESTED = 512
"""Levels of a schema or structural tag as it is written: Python reads 990 of them, and writes and checks fewer."""

MOST_BRANCHES = 2000
"""Members of `anyOf` and the like, in all: 2,000 that are arrays take 2 s with the large vocabulary."""

MOST_PROPERTIES = 500
"""Of one object, and items of one `prefixItems`. 1,000 that may be left out take 0.3 s with the small vocabulary and
2 s with the large one, and 3,000 take 5 s with the small one."""

MOST_PROPERTIES_IN_ALL = 10_000
"""Of all objects and `prefixItems` of a schema: 3,000 in objects of 20 take 0.8 s with the large vocabulary."""

MOST_LEFT_OUT_SQUARES = 250_000
"""Sum over all objects of the square of the properties that may be left out, which is what they cost: one object of 500
takes 1.7 s with the large vocabulary, three take 6 s, and 19 of 115 take 2.5 s."""

MOST_FORMATS = 1000
"""Of all schemas: 300 mixed ones take 1.9 s with the large vocabulary, 1,900 take 18 s."""

DEAR_FORMATS = {"uri-template": 4, "ipv6": 4}
"""Formats that count more than once: 300 take 4 to 7 s, where 300 of each other one take 1 s or less."""

MOST_OPTIONAL_SQUARES = MOST_OPTIONAL**2
"""Sum over all different patterns of the square of the parts that may be left out, which is what they cost: 32 patterns
of 32 `[a-z]?` take 16 s with the large vocabulary, as one of 128 does, two seconds of eight cores, and eight of 128
more than 25 s. The same pattern at another place is compiled once."""

MOST_REPEATED_SQUARES = MOST_REPEATED**2
"""Sum over all different patterns of the square of their stars and question marks: 50 of 50 take 4 s."""

MOST_STATES = 2500
"""Of an object, properties that may be left out times the number of which it must have, or may: at 5,000 it takes
0.6 s, and at 125,000 more than 30 s."""

VALUES = ("enum", "type")
BRANCHES = ("anyOf", "oneOf", "allOf", "elements", "tags", "structures", "triggers", "excludes", "end", "rules")
"""Keywords whose values have members that are compiled one by one; from the fourth on those of structural tags."""

TEXTS = ("value", "begin", "end", "triggers", "excludes", "separator", "rules")
"""Keywords of structural tags whose texts are compiled."""

MEMBERS = ("properties", "patternProperties", "prefixItems", "elements")
"""Keywords whose values are what an object or an array has, one after another."""

COUNTS = ("minProperties", "maxProperties")
LENGTHS = ("minLength", "maxLength")


class Count:
    """What the schemas of one request have of everything that is bounded."""

    def __init__(self, is_tag: bool = False) -> None:
        """Begin with nothing; of what `is_tag` the texts around its schemas count as well."""
        self._is_tag = is_tag
        self._bytes = self._names = self._values = self._branches = 0
        self._members = self._squares = self._formats = self._counted = 0
        self._patterns: set[str] = set()
        self._lengths: set[tuple[int, ...]] = set()

    def add(self, schema: Any) -> None:
        """Count a schema, its values as if they were schemas too. Raises RequestRefusedError."""
        for node in objects(schema):
            self._add_texts(node)
            self._add_members(node)
            self._add_required(node)
            self._add_lengths(node)
            pattern = node.get("pattern")
            if isinstance(pattern, str):
                self._add_pattern(pattern, "a pattern of the schema")
        refuse_beyond(MOST_ALTERNATIVES, self._values, "the enumerations of the schema have {} values in all")
        refuse_beyond(MOST_BRANCHES, self._branches, "the schema has {} members of anyOf and the like in all")
        refuse_beyond(MOST_PROPERTIES_IN_ALL, self._members, "the schema has {} properties and prefixItems in all")
        refuse_beyond(MOST_BYTES, self._names, "the names of properties in the schema have {} bytes in all")
        text = "the squares of how many properties each object may leave out add up to {}"
        refuse_beyond(MOST_LEFT_OUT_SQUARES, self._squares, text)
        refuse_beyond(MOST_FORMATS, self._formats, "the formats of the schema count as {} in all")
        self._check_patterns()

    def _check_patterns(self) -> None:
        patterns = self._patterns
        text = "the squares of how many parts each pattern of the schema may leave out add up to {}"
        refuse_beyond(MOST_OPTIONAL_SQUARES, sum(optional(one) ** 2 for one in patterns), text)
        text = "the squares of how many quantifiers each pattern of the schema has add up to {}"
        refuse_beyond(MOST_REPEATED_SQUARES, sum(repeated(one) ** 2 for one in patterns), text)
        text = "the squares of what the repetitions of the patterns count to add up to {}"
        refuse_beyond(MOST_COUNTED_SQUARES, self._counted, text)
        lengths = sum(min(LONGEST, max(pair)) for pair in self._lengths) + sum(map(length, patterns))
        refuse_beyond(
            MOST_LENGTHS, lengths, f"the different lengths of texts, {LONGEST} at most of each, add up to {{}}"
        )

    def _add_texts(self, node: dict[str, Any]) -> None:
        self._values += _members(node, VALUES)
        self._branches += _members(node, BRANCHES)
        for name in ("enum", "const"):
            if name in node:
                self._add_bytes(size(json.dumps(node[name], ensure_ascii=False)), f"{name} of the schema")
        if self._is_tag:
            for name in TEXTS:
                self._add_bytes(sum(map(size, _texts(node.get(name)))), f"{name} of the structural tag")

    def _add_bytes(self, count: int, what: str) -> None:
        """Refuse as soon as there are too many: what is in each other is counted for each."""
        refuse_beyond(MOST_BYTES, count, f"{what} has {{}} bytes")
        self._bytes += count
        text = "the values, texts and patterns of the schema have {} bytes or more in all"
        refuse_beyond(MOST_BYTES_IN_ALL, self._bytes, text)

    def _add_members(self, node: dict[str, Any]) -> None:
        for keyword in MEMBERS:
            members = node.get(keyword)
            if not isinstance(members, dict | list):
                continue
            refuse_beyond(MOST_PROPERTIES, len(members), f"a part of the schema has {{}} {keyword}")
            self._members += len(members)
            if isinstance(members, dict):
                self._names += sum(map(size, members))
                _check_states(len(members), node)
            if keyword == "patternProperties":
                for name in members:
                    self._add_pattern(str(name), "a name in patternProperties")

    def _add_required(self, node: dict[str, Any]) -> None:
        """Count the properties that an object must have though it does not say what they are, and those it need not."""
        properties, required = node.get("properties"), node.get("required")
        named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        given = set(properties) if isinstance(properties, dict) else set()
        text = "a part of the schema has {} properties, with those that are only required"
        refuse_beyond(MOST_PROPERTIES, len(given | named), text)
        self._members += len(named - given)
        self._names += sum(map(size, named - given))
        self._squares += len(given - named) ** 2

    def _add_lengths(self, node: dict[str, Any]) -> None:
        form = node.get("format")
        self._formats += DEAR_FORMATS.get(form, 1) if isinstance(form, str) else 0
        self._lengths.add(tuple(_up_to(sys.maxsize, node.get(keyword)) for keyword in LENGTHS))

    def _add_pattern(self, pattern: str, what: str) -> None:
        self._counted += counted_squares(pattern)
        if pattern not in self._patterns:
            check_regex(pattern, what)
            self._add_bytes(size(pattern), what)
            self._patterns.add(pattern)


def _check_states(members: int, node: dict[str, Any]) -> None:
    """Raise RequestRefusedError if too much is to be told apart of an object that counts its properties."""
    for keyword in COUNTS:
        count = _up_to(members, node.get(keyword))
        text = f"{members} properties of which {keyword} counts {count}: {{}} states"
        refuse_beyond(MOST_STATES, members * count, text)


def check_size(text: str, name: str) -> None:
    """Raise RequestRefusedError if a schema or a structural tag is too long to be looked at."""
    refuse_beyond(MOST_SCHEMA_BYTES, size(text), f"{name} has {{}} bytes")


def check_nodes(value: Any, name: str) -> int:
    """Return how many objects and arrays a schema or structural tag has. Raises RequestRefusedError.

    Neither may be too many, nor too deep in each other: what walks through them later need not care.
    """
    nodes, level = 0, 0
    left = [value] if isinstance(value, dict | list) else []
    while left:
        nodes += len(left)
        level += 1
        refuse_beyond(MOST_NODES, nodes, f"{name} has {{}} objects and arrays or more")
        refuse_beyond(MOST_NESTED, level, f"{name} has {{}} levels of objects and arrays or more")
        children = [node.values() if isinstance(node, dict) else node for node in left]
        left = [child for found in children for child in found if isinstance(child, dict | list)]
    return nodes


def check_choices(choices: Sequence[str]) -> None:
    """Raise RequestRefusedError for too many choices, or too long ones."""
    refuse_beyond(MOST_ALTERNATIVES, len(choices), "choice has {} alternatives")
    refuse_beyond(MOST_BYTES, sum(map(size, choices)), "choice has {} bytes in all")


def _members(node: dict[str, Any], keywords: Sequence[str]) -> int:
    return sum(len(found) for name in keywords if isinstance(found := node.get(name), list))


def _up_to(most: int, count: Any) -> int:
    """Return a number of a schema, `most` if it is more; 0 for what is none."""
    return int(min(count, most)) if isinstance(count, int | float) and count > 0 else 0


def _texts(value: Any) -> Iterator[str]:
    """Yield a text, or all texts of a list and of the lists in it."""
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            left += node
