"""What is bounded of structured outputs: what is just within the bounds compiles, with vLLM's checks and xgrammar.

`python -m pytest -s --durations=0` of this file shows how long each takes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import RequestRefusedError
from services.worker.vllm.amounts import (
    MOST_ALTERNATIVES,
    MOST_BRANCHES,
    MOST_BYTES,
    MOST_OPTIONAL,
    MOST_PROPERTIES,
    MOST_REPEATED,
    MOST_SCHEMA_BYTES,
)
from services.worker.vllm.depth import MOST_BRACKETS, MOST_LEVELS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@cache
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(make_tiny_model(directory)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "tiny"


def compile_as_vllm(home: Path, **kind: Any) -> None:
    """Bound, check and compile what was asked for. Raises RequestRefusedError."""
    import xgrammar
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(**kind))
    wanted = params.structured_outputs
    assert wanted is not None
    bound(wanted, 100)
    like_vllms: Any = SimpleNamespace(is_diffusion=False), SimpleNamespace(backend="auto")
    params._validate_structured_outputs(*like_vllms, tokenizer(home))
    if wanted._backend != "xgrammar":
        return
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(home), vocab_size=2048)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    if wanted.json is not None:
        compiler.compile_json_schema(wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json))
    elif wanted.regex is not None:
        compiler.compile_regex(wanted.regex)
    elif wanted.structural_tag is not None:
        compiler.compile_structural_tag(wanted.structural_tag)
    else:
        assert wanted.grammar is not None
        compiler.compile_grammar(wanted.grammar)


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def properties(count: int, **more: Any) -> Any:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names(count)}, **more}


def levels(count: int) -> Any:
    defs: dict[str, Any] = {f"a{n}": {"properties": {"p": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{count}": {"type": "integer", "multipleOf": 3}}}


WITHIN: dict[str, dict[str, Any]] = {
    "choices": {"choice": names(MOST_ALTERNATIVES)},
    "one long choice": {"choice": ["x" * MOST_BYTES]},
    "white space": {"json": {"type": "integer"}, "whitespace_pattern": "[\n ]*"},
    "an enumeration": {"json": {"enum": [f"the city of {name}" for name in names(2000)]}},
    "numbers": {"json": {"enum": list(range(MOST_ALTERNATIVES))}},
    "members": {"json": {"anyOf": [{"const": name} for name in names(MOST_BRANCHES)]}},
    "properties": {"json": properties(MOST_PROPERTIES)},
    "properties of which some must be there": {"json": properties(50, minProperties=50)},
    "properties that must be there": {"json": properties(MOST_PROPERTIES, required=names(MOST_PROPERTIES))},
    "a description": {"json": {"type": "integer", "description": "x" * (MOST_SCHEMA_BYTES - 100)}},
    "levels": {"json": levels((MOST_LEVELS - 3) // 3)},
    "brackets": {"json": {"type": "string", "pattern": "(" * MOST_BRACKETS + "a" + ")" * MOST_BRACKETS}},
    "optional parts": {"regex": "a?" * MOST_OPTIONAL},
    "empty alternatives": {"json": {"type": "string", "pattern": "^" + "(a|)" * MOST_OPTIONAL + "$"}},
    "quantifiers": {"regex": "[a-z]*" * MOST_REPEATED},
    "a long regex": {"regex": "a" * MOST_BYTES},
    "alternatives of a regex": {"regex": "|".join(names(MOST_ALTERNATIVES))},
    "a grammar": {"grammar": "root ::= " + " | ".join(f'"{name}"' for name in names(6000))},
}


@pytest.mark.parametrize("which", WITHIN)
def test_what_is_within_the_bounds_is_compiled(home: Path, which: str) -> None:
    compile_as_vllm(home, **WITHIN[which])


BEYOND: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"choice": names(80_000)}, "choice has 80000 alternatives; at most 10000 can be compiled"),
    "one long choice": ({"choice": ["x" * 10**6]}, "choice has 1000000 bytes in all; at most 65536"),
    "values": (
        {"json": {"items": {"enum": list(range(10_001))}}},
        "of the schema have 10001 values in all",
    ),
    "long values": ({"json": {"enum": ["x" * 1000 for _ in range(100)]}}, "of the schema have 100400 bytes in all"),
    "a constant": ({"json": {"const": "x" * 10**5}}, "values, names and patterns of the schema have 100002 bytes"),
    "members": ({"json": {"anyOf": [{"oneOf": [True] * 99}] * 21}}, "the schema has 2100 members of anyOf"),
    "properties": ({"json": properties(501)}, "a part of the schema has 501 properties; at most 500"),
    "properties in all": (
        {"json": {"anyOf": [properties(400)] * 26}},
        "the schema has 10400 properties and prefixItems",
    ),
    "properties of which some must be there": (
        {"json": properties(300, minProperties=150)},
        "300 properties of which minProperties counts 150: 45000 states",
    ),
    "optional parts": ({"regex": "a?" * 1000}, "regex has 1000 parts that may be left out"),
    "empty alternatives": ({"regex": "(|a)" * 999}, "regex has 999 parts that may be left out"),
    "optional parts of a pattern": ({"json": {"pattern": "a?" * 200}}, "a pattern of the schema has 200 parts"),
    "optional parts of patterns": (
        {"json": {"anyOf": [{"pattern": "a?" * 100}] * 9}},
        "the patterns of the schema have 900 parts in all that may be left out",
    ),
    "items": ({"json": {"prefixItems": [True] * 501}}, "a part of the schema has 501 prefixItems; at most 500"),
    "counts from nothing": ({"regex": "a{0,1}" * 129}, "regex has 129 parts that may be left out"),
    "quantifiers": ({"grammar": "root ::= " + "[a-z]* " * 999}, "grammar has 999 quantifiers"),
    "a long regex": ({"regex": "a" * 65_537}, "regex has 65537 bytes; at most 65536"),
    "a long grammar": ({"grammar": 'root ::= "' + "a" * 65_537}, "grammar has 65547 bytes"),
    "a schema of a grammar": ({"grammar": f"start: %json {json.dumps(levels(300))}"}, "of the grammar leads through"),
    "a schema of a tag": (
        {"structural_tag": json.dumps({"structures": [{"begin": "x", "schema": levels(300), "end": ""}]})},
        "the schema leads through 903 levels",
    ),
    "a format of a tag": (
        {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": "(" * 2000}})},
        "a pattern of the schema has 2000 opening brackets",
    ),
    "a grammar of a tag": (
        {"structural_tag": json.dumps({"format": {"type": "grammar", "grammar": "root ::= " + '"a"? ' * 999}})},
        "grammar has 999 parts that may be left out",
    ),
    "elements of a tag": (
        {"structural_tag": json.dumps({"format": {"type": "sequence", "elements": [{}] * 999}})},
        "a part of the schema has 999 elements; at most 500",
    ),
    "quantifiers of patterns": (
        {"json": {"anyOf": [{"pattern": "a*" * 200}] * 3}},
        "the patterns of the schema have 600 quantifiers in all; at most 500",
    ),
    "a long schema": ({"json": json.dumps({"title": "x" * 2**18})}, "json has 262157 bytes; at most 262144"),
    "brackets": ({"regex": "(" * 2000}, "regex has 2000 opening brackets"),
    "white space": ({"json": {}, "whitespace_pattern": "(" * 2000}, "whitespace_pattern has 2000 opening brackets"),
}


@pytest.mark.parametrize("which", BEYOND)
def test_what_is_beyond_is_refused_with_both_numbers(home: Path, which: str) -> None:
    kind, said = BEYOND[which]
    with pytest.raises(RequestRefusedError, match=said) as refused:
        compile_as_vllm(home, **kind)
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", "sampling.structured_outputs")


def test_a_question_mark_that_is_text_is_no_option(home: Path) -> None:
    compile_as_vllm(home, regex="(" + r"what\?|" * 300 + "no)")


def test_questions_in_the_descriptions_of_tools_are_no_options() -> None:
    """As Mistral's parser writes them into a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    described = f"start: %json {json.dumps({'type': 'object', 'description': 'Which? ' * 300})}"
    bound(StructuredOutputsParams(grammar=described), 100, is_clients=False)
    deep = StructuredOutputsParams(grammar=f"start: %json {json.dumps(levels(300))}")
    with pytest.raises(RequestRefusedError, match="a schema of the grammar leads through"):
        bound(deep, 100, is_clients=False)
