"""Structured outputs as a client asks for them, before a compiler of grammars is given them.

vLLM checks them in the worker's own process, and has them compiled by the few threads that its engine core keeps for
that, which nothing interrupts: what ends the compiler, or keeps it busy, is everybody's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from services.worker.vllm.amounts import Count, check_choices, check_regex, check_size
from services.worker.vllm.arrays import bound_arrays, check_inline_arrays
from services.worker.vllm.depth import check_brackets, check_depth, check_patterns
from services.worker.vllm.schemas import check_says_something, objects

INLINE = re.compile(r"%json[ \t\r\n]*")
"""What a schema follows in a Lark grammar."""

OF_TAGS = ("schema", "json_schema")
"""What a schema is called in a structural tag, whose references begin at it."""

DECODER = json.JSONDecoder()


def bound(wanted: StructuredOutputsParams, max_tokens: int, is_clients: bool = True) -> None:
    """Change what a run of `max_tokens` cannot come to. Raises RequestRefusedError for what no compiler is to see.

    Of a grammar that is not the client's, but was made of its tools by a parser, their schemas alone are looked at:
    they have descriptions, and with them question marks.
    """
    check_choices(wanted.choice or ())
    for name in ("regex", "whitespace_pattern"):
        pattern = getattr(wanted, name) or ""
        check_regex(pattern, name)
        check_brackets(pattern, name)
    if is_clients:
        check_regex(wanted.grammar or "", "grammar")
    _check_inline(wanted.grammar or "")
    for name in ("json", "structural_tag"):
        given = getattr(wanted, name)
        if given is None:
            continue
        if isinstance(given, str):
            check_size(given, name)
        try:
            schema = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            continue  # vLLM's own check says what is wrong with it
        if name == "json":
            check_depth(schema)
            check_says_something(schema)
        else:
            _check_tag(schema)
        check_patterns(schema)
        Count().add(schema)
        if bound_arrays(schema, max_tokens):
            setattr(wanted, name, json.dumps(schema) if isinstance(given, str) else schema)


def _check_inline(grammar: str) -> None:
    schemas = list(_inline(grammar))
    check_inline_arrays(schemas)
    count = Count()
    for schema in schemas:
        check_depth(schema, "a schema of the grammar")
        check_patterns(schema)
        count.add(schema)


def _inline(grammar: str) -> Iterator[Any]:
    """Yield the schemas of a grammar, those in its strings and comments as well."""
    for found in INLINE.finditer(grammar):
        with suppress(ValueError, RecursionError):  # the compiler reads no more than Python does
            yield DECODER.raw_decode(grammar, found.end())[0]


def _check_tag(tag: Any) -> None:
    for schema in _schemas_of_tag(tag):
        check_depth(schema)
    for node in objects(tag):
        grammar = node.get("grammar")
        if isinstance(grammar, str):
            check_regex(grammar, "grammar")
            _check_inline(grammar)


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yield the schemas of a structural tag."""
    left = [tag]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for name, value in node.items():
                if name in OF_TAGS:
                    yield value
                else:
                    left.append(value)
