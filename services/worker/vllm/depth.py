"""How deep a compiler of grammars goes into a schema: one that calls itself at every level ends the process on which it
runs when its stack is full, and with it whoever else runs there.

vLLM looks at the levels of the JSON alone. A reference leads a compiler on as a level does, and a bracket in a pattern
is one as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from services.worker.vllm.schemas import REFERENCES, objects, references_of, refused

MOST_LEVELS = 1024
"""Of JSON, on the longest way that references lead.

The usual stack of 8 MiB is enough for llguidance to go down 2,000 levels, and not 4,000, whatever they are made of; for
xgrammar it is enough for more."""

MOST_BRACKETS = 1000
"""That open in one pattern, in each other or not: readers differ in which of them a bracket closes. xgrammar goes down
20,000 of them, and not 30,000."""

OPENING = "([{"

INDEX_DIGITS = 10
"""More than an index has; Python refuses to read numbers of thousands of digits."""


NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")
"""Keywords that name the object in which they are, if they are texts: what has a property `id` is not named."""

MOST_POINTERS = 20_000
"""Pointers times names at which they may begin: all of them are followed, in a fifth of a second."""

BY_NAME = 0
"""The id of a region that is none: what refers to a name leads to it, and it leads to all that have one."""


class Region(NamedTuple):
    """A part of a schema to which something refers, without the parts of it of which that is so too."""

    levels: int
    leads_to: list[int]
    """The regions within it, and those to which it refers, by the ids of their first object."""


def check_depth(schema: Any, what: str = "the schema") -> None:
    """Raise RequestRefusedError if a compiler might go deeper into a schema than its stack is large."""
    if not isinstance(schema, dict | list):
        return
    references = references_of(schema)
    named = [node for node in objects(schema) if _is_named(node)]
    pointers = [one for one in references if "#/" in one]
    # Where a pointer begins at a name, it may lead anywhere: each takes the whole way once more.
    unclear = len(pointers) if len(pointers) * len(named) > MOST_POINTERS else 0
    begins = [] if unclear else named
    targets = {reference: _targets(reference, schema, begins) for reference in references}
    names = {reference for reference in references if not reference.startswith("#/")}
    regions = _regions(schema, targets, names, named)
    levels = _longest(regions, id(schema)) * (1 + unclear)
    if levels > MOST_LEVELS:
        text = f"{what} leads through {levels} levels of objects and arrays, by its references; at most {MOST_LEVELS}"
        raise refused(text)


def _is_named(node: dict[str, Any]) -> bool:
    return node.get("$recursiveAnchor") is True or any(isinstance(node.get(name), str) for name in NAMES)


def check_brackets(pattern: str, what: str) -> None:
    """Raise RequestRefusedError if a pattern has so many brackets that their nesting might be too deep."""
    count = sum(pattern.count(bracket) for bracket in OPENING)
    if count > MOST_BRACKETS:
        raise refused(f"{what} has {count} opening brackets; at most {MOST_BRACKETS} can be compiled")


def check_patterns(schema: Any) -> None:
    """Look at all patterns of a schema. Raises RequestRefusedError."""
    for node in objects(schema):
        pattern, by_pattern = node.get("pattern"), node.get("patternProperties")
        if isinstance(pattern, str):
            check_brackets(pattern, "a pattern of the schema")
        if isinstance(by_pattern, dict):
            for name in by_pattern:
                check_brackets(name, "a name in patternProperties")


def _targets(reference: str, schema: Any, named: list[Any]) -> list[Any]:
    """Return the objects and arrays to which a pointer leads, as each of its readers might decode it.

    It may begin at the whole schema, and at what in it has a name.
    """
    if reference == "#":
        return [schema]
    _, is_pointer, way = reference.partition("#/")
    if not is_pointer:
        return []
    ways = {parts for pointer in (way, unquote(way)) for parts in _parts(pointer)}
    found = {id(node): node for begin in (schema, *named) for parts in ways for node in _follow(begin, parts)}
    return list(found.values())


def _parts(pointer: str) -> tuple[tuple[str, ...], ...]:
    parts = tuple(pointer.split("/"))
    return parts, tuple(part for part in parts if part)


def _follow(node: Any, parts: tuple[str, ...]) -> list[Any]:
    """Return the object or array to which parts of a pointer lead, if there is one."""
    for part in parts:
        if isinstance(node, list):
            index = int(part) if part.isdecimal() and len(part) < INDEX_DIGITS else len(node)
            node = node[index] if index < len(node) else None
        elif isinstance(node, dict):
            node = node.get(part, node.get(part.replace("~1", "/").replace("~0", "~")))
        else:
            return []
    return [node] if isinstance(node, dict | list) else []


def _regions(schema: Any, targets: dict[str, list[Any]], names: set[str], named: list[Any]) -> dict[int, Region]:
    """Return the regions of a schema by the ids of their first object.

    `names` are references that may lead to each of `named`.
    """
    starts = {id(schema)} | {id(target) for found in targets.values() for target in found}
    starts |= set(map(id, named)) if names else set()
    deepest = dict.fromkeys(starts, 0)
    leads_to: dict[int, list[int]] = {start: [] for start in starts}
    left = [(schema, id(schema), 1)]
    while left:
        node, region, level = left.pop()
        if id(node) in starts and id(node) != region:
            leads_to[region].append(id(node))
            region, level = id(node), 1
        deepest[region] = max(deepest[region], level)
        if isinstance(node, dict):
            for keyword in REFERENCES:
                reference = node.get(keyword)
                if isinstance(reference, str):
                    leads_to[region] += map(id, targets[reference])
                    leads_to[region] += [BY_NAME] if reference in names else []
        children = node.values() if isinstance(node, dict) else node
        left += [(child, region, level + 1) for child in children if isinstance(child, dict | list)]
    by_name = Region(0, list(map(id, named)))
    return {BY_NAME: by_name} | {start: Region(deepest[start], leads_to[start]) for start in starts}


def _longest(regions: dict[int, Region], first: int) -> int:
    """Return the levels of the longest way from a region on that enters none twice, or somewhat more.

    Regions that lead to each other are taken as one of all their levels: which way is the longest among them nobody
    can say in time.
    """
    longest: dict[int, int] = {}
    for group in _groups(regions, first):
        members = set(group)
        beyond = [longest[to] for start in group for to in regions[start].leads_to if to not in members]
        levels = sum(regions[start].levels for start in group) + max(beyond, default=0)
        longest.update(dict.fromkeys(group, levels))
    return longest[first]


def _groups(regions: dict[int, Region], first: int) -> Iterator[list[int]]:
    """Yield the regions that lead to each other, together, after all to which they lead (by Tarjan's algorithm)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    open_ones: list[int] = []
    is_open: set[int] = set()
    way: list[tuple[int, Iterator[int]]] = []

    def enter(start: int) -> None:
        number[start] = lowest[start] = len(number)
        open_ones.append(start)
        is_open.add(start)
        way.append((start, iter(regions[start].leads_to)))

    enter(first)
    while way:
        start, left = way[-1]
        to = next(left, None)
        if to is not None:
            if to not in number:
                enter(to)
            elif to in is_open:
                lowest[start] = min(lowest[start], number[to])
            continue
        way.pop()
        if way:
            lowest[way[-1][0]] = min(lowest[way[-1][0]], lowest[start])
        if lowest[start] == number[start]:
            group: list[int] = []
            while not group or group[-1] != start:
                group.append(open_ones.pop())
            is_open.difference_update(group)
            yield group
