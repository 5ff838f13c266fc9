"""Structured outputs as a client asks for them, before a compiler of grammars is given them.

vLLM checks them in the worker's own process, after that of the tokenizer has tried it (`forms.py`), and has them
compiled by the few threads that its engine core keeps for that, which nothing interrupts: what ends the compiler, or
keeps it busy, is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from services.worker.vllm.amounts import MOST_NESTED, Count, check_choices, check_nodes, check_size
from services.worker.vllm.arrays import bound_sizes
from services.worker.vllm.depth import check_brackets, check_depth, check_patterns
from services.worker.vllm.inline import check_inline
from services.worker.vllm.regexes import check_regex
from services.worker.vllm.schemas import check_says_something, objects, refused

OF_TAGS = ("schema", "json_schema")
"""What a schema is called in a structural tag, whose references begin at it."""


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
        check_regex(wanted.grammar or "", "grammar", is_grammar=True)
    check_inline([wanted.grammar or ""])
    for name in ("json", "structural_tag"):
        given = getattr(wanted, name)
        if given is None:
            continue
        schema = _read(given, name)
        if schema is None:
            continue  # vLLM's own check says what is wrong with it
        check_nodes(schema, name)
        is_tag = name == "structural_tag"
        if is_tag:
            _check_tag(schema)
        else:
            check_depth(schema)
            check_says_something(schema)
        check_patterns(schema)
        changed = bound_sizes(schema, max_tokens)
        Count(is_tag).add(schema)
        if changed:
            setattr(wanted, name, json.dumps(schema) if isinstance(given, str) else schema)


def _read(given: Any, name: str) -> Any:
    """Return what is within a schema or a structural tag; None for what is no JSON."""
    if not isinstance(given, str):
        return given
    check_size(given, name)
    try:
        return json.loads(given)
    except ValueError:
        return None
    except RecursionError:
        raise refused(f"{name} has more levels of objects and arrays than can be read; at most {MOST_NESTED}") from None


def _check_tag(tag: Any) -> None:
    for schema in _schemas_of_tag(tag):
        check_depth(schema)
    grammars = [found for node in objects(tag) if isinstance(found := node.get("grammar"), str)]
    for grammar in grammars:
        check_regex(grammar, "grammar", is_grammar=True)
    check_inline(grammars)


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
