"""The schemas within a client's Lark grammar, after `%json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from services.worker.vllm.amounts import MOST_NODES, Count, check_nodes
from services.worker.vllm.arrays import check_inline_arrays
from services.worker.vllm.depth import check_depth, check_patterns
from services.worker.vllm.schemas import refuse_beyond

INLINE = re.compile(r"%json[ \t\r\n]*")
"""What a schema follows in a Lark grammar."""

MOST_INLINE = 500
"""Schemas in all grammars of a request: to look at 500 takes some 0.1 s of the worker's event loop."""

DECODER = json.JSONDecoder()


def check_inline(grammars: Sequence[str]) -> None:
    """Look at the schemas of all grammars of a request. Raises RequestRefusedError."""
    found = sum(grammar.count("%json") for grammar in grammars)
    refuse_beyond(MOST_INLINE, found, "the grammar has {} schemas after %json")
    schemas = list(_inline(grammars))
    nodes = 0
    for schema in schemas:
        nodes += check_nodes(schema, "a schema of the grammar")
    refuse_beyond(MOST_NODES, nodes, "the schemas of the grammar have {} objects and arrays")
    check_inline_arrays(schemas)
    count = Count()
    for schema in schemas:
        check_depth(schema, "a schema of the grammar")
        check_patterns(schema)
        count.add(schema)


def _inline(grammars: Sequence[str]) -> Iterator[Any]:
    """Yield the schemas of grammars, those in their strings and comments as well."""
    for grammar in grammars:
        for found in INLINE.finditer(grammar):
            with suppress(ValueError, RecursionError):  # the compiler reads no more than Python does
                yield DECODER.raw_decode(grammar, found.end())[0]
