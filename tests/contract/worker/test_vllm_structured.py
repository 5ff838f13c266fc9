"""What is bounded of structured outputs: what is just within the bounds compiles, with vLLM's checks and xgrammar.

`python -m pytest -s --durations=0` of this file shows how long each takes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import RequestRefusedError
from services.worker.vllm.amounts import (
    MOST_BRANCHES,
    MOST_FORMATS,
    MOST_LEFT_OUT_SQUARES,
    MOST_NODES,
    MOST_PROPERTIES,
    MOST_SCHEMA_BYTES,
)
from services.worker.vllm.depth import MOST_BRACKETS, MOST_LEVELS
from services.worker.vllm.regexes import MOST_ALTERNATIVES, MOST_BYTES, MOST_OPTIONAL, MOST_REPEATED

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


def texts(*said: dict[str, Any]) -> Any:
    """Return a schema of an object of texts, each with something that is said of it."""
    fields = {f"k{at}": {"type": "string", **one} for at, one in enumerate(said)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def tag(**form: Any) -> dict[str, Any]:
    """Return what asks for a structural tag of this format."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def tools(count: int) -> Any:
    """Return what is made of tools of which one must be called."""
    values = [f"value_of_filter_{number}" for number in range(30)]
    fields = properties(20, required=["n0"])["properties"] | {"filter": {"items": {"enum": values}}}
    named = [{"properties": {"name": {"enum": [name]}, "parameters": {"properties": fields}}} for name in names(count)]
    return {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": named}}


DATE = r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?$"
FIELD = r'"n{}"[ ]?:[ ]?"([^"\\]|\\["\\])*"[ ]?'
"""As Outlines writes the fields of an object."""

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
    "enumerations": {"json": texts(*({"enum": [f"value_of_filter_{at}_{n}" for n in range(30)]} for at in range(200)))},
    "tools with enumerations": {"json": tools(100)},
    "dates": {"json": texts(*[{"pattern": DATE}] * 100)},
    "different patterns": {"json": texts(*({"pattern": f"^{n}-[A-Z]+(-[a-z]+)?([.][0-9]*)?$"} for n in range(200)))},
    "an object as a regex": {"regex": r"\{[ ]?" + ",[ ]?".join(FIELD.format(n) for n in range(40)) + r"\}"},
    "groups": {"regex": "|".join(f"(?:item-{n})" for n in range(200))},
    "a repetition": {"regex": "[a-z ]{1,4000}"},
    "parts that repeat": {"regex": r"([a-z0-9]{1,63}[.]){1,8}[a-z]{2,63}"},
    "lengths": {"json": texts(*({"maxLength": n} for n in (32, 50, 64, 100, 128, 200, 255, 500, 1000, 2000)))},
    "equal lengths": {"json": texts(*[{"minLength": 1, "maxLength": 2000}] * 400)},
    "lengths that no run can come to": {"json": texts(*({"maxLength": 10**6 + n} for n in range(400)))},
    "formats": {"json": {"anyOf": [{"type": "string", "format": "date-time"}] * MOST_FORMATS}},
    "objects": {"json": {"type": "array", "prefixItems": [properties(100)] * 25}},
    "ends of a tag": tag(type="tag", begin="a", content={"type": "any_text"}, end=names(MOST_BRANCHES)),
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
    "long values": (
        {"json": {"enum": ["x" * 1000 for _ in range(100)]}},
        "enum of the schema has 100400 bytes; at most 65536",
    ),
    "a constant": ({"json": {"const": "x" * 10**5}}, "const of the schema has 100002 bytes; at most 65536"),
    "constants": (
        {"json": {"anyOf": [{"const": "x" * 50_000}] * 4}},
        "have 200008 bytes or more in all; at most 196608",
    ),
    "names": (
        {"json": {"properties": {f"{n}" + "x" * 400: {} for n in range(200)}}},
        "properties in the schema have 80490",
    ),
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
        {"json": texts(*({"pattern": f"{n}" + "a?" * 100} for n in range(9)))},
        "how many parts each pattern of the schema may leave out add up to 90000; at most 16384",
    ),
    "items": ({"json": {"prefixItems": [True] * 501}}, "a part of the schema has 501 prefixItems; at most 500"),
    "counts from nothing": ({"regex": "a{0,1}" * 129}, "regex has 129 parts that may be left out"),
    "quantifiers": ({"grammar": "root ::= " + "[a-z]* " * 999}, "grammar has 999 quantifiers"),
    "a long regex": ({"regex": "a" * 65_537}, "regex has 65537 bytes; at most 65536"),
    "a long grammar": ({"grammar": 'root ::= "' + "a" * 65_537}, "grammar has 65547 bytes"),
    "a schema of a grammar": ({"grammar": f"start: %json {json.dumps(levels(400))}"}, "of the grammar leads through"),
    "a schema of a tag": (
        {"structural_tag": json.dumps({"structures": [{"begin": "x", "schema": levels(400), "end": ""}]})},
        "the schema leads through 1203 levels",
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
        {"json": texts(*({"pattern": f"{n}" + "a*" * 200} for n in range(4)))},
        "how many quantifiers each pattern of the schema has add up to 160000; at most 62500",
    ),
    "a long schema": ({"json": json.dumps({"title": "x" * 2**18})}, "json has 262157 bytes; at most 262144"),
    "repetitions of patterns": (
        {"json": texts(*({"pattern": f"^[a-zA-Z ]{{1,{2000 + n}}}$"} for n in range(10)))},
        "the squares of what the repetitions of the patterns count to add up to 40180285; at most 16000000",
    ),
    "the same repetition again": (
        {"json": texts(*[{"pattern": "^[a-zA-Z ]{1,2000}$"}] * 10)},
        "the repetitions of the patterns count to add up to 40000000",
    ),
    "a repetition": ({"regex": "a{4001}"}, "the repetitions of regex count to add up to 16008001; at most 16000000"),
    "a repetition without end": ({"regex": "a{ 5000, }"}, "the repetitions of regex count to add up to 25000000"),
    "a repetition of thousands of digits": ({"regex": "a{" + "9" * 9999 + "}"}, "count to add up to 256000000000000"),
    "repetitions in each other": ({"regex": "([a-z ]{1,80},){1,80}"}, "repetitions of regex are 6400 long in all"),
    "repetitions in a class": ({"regex": r"(?:[)(]\)[a-z ]{80},){80}"}, "repetitions of regex are 6400 long in all"),
    "lengths": (
        {"json": texts(*({"minLength": n, "maxLength": 255} for n in range(20)))},
        "the different lengths of texts, 256 at most of each, add up to 5100; at most 4000",
    ),
    "long lengths": (
        {"json": texts(*({"maxLength": 2000 + n} for n in range(20)))},
        "of texts, .* add up to 5120; at most",
    ),
    "lengths and repetitions": (
        {
            "json": texts(
                *({"maxLength": 20 + n} for n in range(40)), *({"pattern": f"{n}[ab]{{250}}"} for n in range(10))
            )
        },
        "the different lengths of texts, 256 at most of each, add up to 4080",
    ),
    "optional properties of objects": (
        {"json": {"prefixItems": [properties(400)] * 2}},
        f"each object may leave out add up to 320000; at most {MOST_LEFT_OUT_SQUARES}",
    ),
    "required": (
        {"json": {"required": names(24_000)}},
        "a part of the schema has 24000 properties, with those that are",
    ),
    "formats": ({"json": {"anyOf": [{"format": "ipv6"}] * 300}}, "the formats of the schema count as 1200 in all"),
    "a text of a tag": (tag(type="const_string", value="x" * 65_537), "value of the structural tag has 65537 bytes"),
    "the begin of a tag": (tag(type="tag", begin="x" * 65_537, end=""), "begin of the structural tag has 65537 bytes"),
    "the end of a tag": (
        {"structural_tag": json.dumps({"structures": [{"begin": "x", "schema": {}, "end": "e" * 65_537}]})},
        "end of the structural tag has 65537 bytes",
    ),
    "texts of a tag": (
        tag(type="sequence", elements=[{"type": "const_string", "value": "x" * 50_000}] * 4),
        "have 200000 bytes or more in all",
    ),
    "ends of a tag": (tag(type="tag", begin="a", end=names(2001)), "2001 members of anyOf and the like"),
    "what a tag excludes": (tag(type="any_text", excludes=names(2001)), "2001 members of anyOf and the like"),
    "rules of a tag": (tag(type="dispatch", rules=[[name, {}] for name in names(2001)]), "2001 members of anyOf"),
    "nested arrays": (
        {"json": {"enum": nested(600)}},
        "json has 513 levels of objects and arrays or more; at most 512",
    ),
    "nested arrays of a tag": (tag(enum=nested(600)), "structural_tag has 513 levels of objects and arrays or more"),
    "more nested arrays": (tag(enum=[]) | {"structural_tag": "[" * 9999}, "structural_tag has more levels of objects"),
    "arrays": ({"json": json.dumps([[]] * 60_000)}, f"json has 60001 objects and arrays or more; at most {MOST_NODES}"),
    "schemas of a grammar": ({"grammar": "start: " + "%json " * 501}, "the grammar has 501 schemas after %json"),
    "schemas of the grammars of a tag": (
        tag(type="sequence", elements=[{"type": "grammar", "grammar": "%json " * 7}] * 100),
        "the grammar has 700 schemas after %json; at most 500",
    ),
    "brackets": ({"regex": "(" * 2000}, "regex has 2000 opening brackets"),
    "white space": ({"json": {}, "whitespace_pattern": "(" * 2000}, "whitespace_pattern has 2000 opening brackets"),
}


@pytest.mark.parametrize("which", BEYOND)
def test_what_is_beyond_is_refused_with_both_numbers(home: Path, which: str) -> None:
    kind, said = BEYOND[which]
    with pytest.raises(RequestRefusedError, match=said) as refused:
        compile_as_vllm(home, **kind)
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", "sampling.structured_outputs")


@pytest.mark.parametrize("part", ["[", "{ ", "{" + " " * 60_000, "{0", "(", "| ", "%json[", "{1,", "\\", "?", "(?:"])
def test_to_look_at_a_text_takes_no_longer_than_it_is_long(part: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    text = part * (MOST_BYTES // len(part))
    began = thread_time()
    with suppress(RequestRefusedError):
        bound(StructuredOutputsParams(grammar=text), 100)
    with suppress(RequestRefusedError):
        bound(StructuredOutputsParams(regex=text), 100)
    assert thread_time() - began < 1


def test_a_question_mark_that_is_text_is_no_option(home: Path) -> None:
    compile_as_vllm(home, regex="(" + r"what\?|" * 300 + "no)")


def test_questions_in_the_descriptions_of_tools_are_no_options() -> None:
    """As Mistral's parser writes them into a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    described = f"start: %json {json.dumps({'type': 'object', 'description': 'Which? ' * 300})}"
    bound(StructuredOutputsParams(grammar=described), 100, is_clients=False)
    deep = StructuredOutputsParams(grammar=f"start: %json {json.dumps(levels(400))}")
    with pytest.raises(RequestRefusedError, match="a schema of the grammar leads through"):
        bound(deep, 100, is_clients=False)
