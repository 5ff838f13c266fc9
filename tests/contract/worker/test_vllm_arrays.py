"""Array sizes in schemas are brought down to what a run can write, and nothing else is changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.worker.engine import RequestRefusedError

pytestmark = pytest.mark.vllm

MAX_TOKENS = 9
MOST = 80


def bounded(schema: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    wanted = StructuredOutputsParams(json=json.dumps(schema))
    bound(wanted, MAX_TOKENS)
    assert isinstance(wanted.json, str)
    return json.loads(wanted.json)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"minItems": 10**9}, {"minItems": MOST}),
        ({"minItems": 1e30, "maxItems": 1e30}, {"minItems": MOST}),
        ({"minItems": 1, "maxItems": 2**31 - 1}, {"minItems": 1}),
        ({"minItems": MOST, "maxItems": MOST}, {"minItems": MOST, "maxItems": MOST}),
        ({"anyOf": [{"items": {"maxItems": 10**6}}]}, {"anyOf": [{"items": {}}]}),
        ({"properties": {"minItems": {"minItems": 10**6}}}, {"properties": {"minItems": {"minItems": MOST}}}),
        ({"properties": {"default": {"minItems": 10**6}}}, {"properties": {"default": {"minItems": MOST}}}),
        ({"$defs": {"const": {"maxItems": 10**6}}}, {"$defs": {"const": {}}}),
        ({"properties": {"properties": {"enum": [{"minItems": 999}]}}},) * 2,
        ({"const": {"minItems": 10**6}}, {"const": {"minItems": 10**6}}),
        ({"enum": [{"maxItems": 10**6}]}, {"enum": [{"maxItems": 10**6}]}),
        ({"minItems": "many", "maxItems": None}, {"minItems": "many", "maxItems": None}),
        ({"maxLength": 2**31}, {}),
        ({"maxLength": 2560, "minLength": 2**31}, {"maxLength": 2560, "minLength": 2**31}),
        ({"default": {"maxLength": 2**31}}, {"default": {"maxLength": 2**31}}),
    ],
)
def test_only_what_a_run_cannot_reach_is_changed(given: Any, wanted: Any) -> None:
    assert bounded(given) == wanted


def test_a_schema_that_needs_no_change_stays_letter_by_letter() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    text = '{ "type":"array",  "maxItems": 3 }'
    wanted = StructuredOutputsParams(json=text)
    bound(wanted, MAX_TOKENS)
    assert wanted.json == text


def test_schemas_within_a_structural_tag_are_bounded_and_what_is_no_json_is_left() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.arrays import MOST_ITEMS
    from services.worker.vllm.structured import bound

    tag = json.dumps({"structures": [{"begin": "<f>", "schema": {"minItems": 10**9}, "end": "</f>"}], "triggers": []})
    wanted = StructuredOutputsParams(structural_tag=tag)
    bound(wanted, 10**9)
    assert json.loads(wanted.structural_tag or "")["structures"][0]["schema"] == {"minItems": MOST_ITEMS}
    broken = StructuredOutputsParams(json="{")
    bound(broken, MAX_TOKENS)
    assert broken.json == "{"
    pattern = StructuredOutputsParams(regex="a{1000}")
    bound(pattern, MAX_TOKENS)
    assert pattern.regex == "a{1000}"


def test_many_large_arrays_are_refused_with_both_numbers() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    arrays = {f"a{number}": {"type": "array", "maxItems": 200_000} for number in range(6)}
    wanted = StructuredOutputsParams(json={"type": "object", "properties": arrays})
    with pytest.raises(RequestRefusedError, match="may have 1200000 items in all; at most 1000000") as refused:
        bound(wanted, 10**6)
    assert refused.value.code == "invalid_parameter"
    bound(wanted, MAX_TOKENS)  # what cannot be reached does not count


@pytest.mark.parametrize(
    "schema",
    [
        {"default": {"minItems": 10**9}, "$ref": "#/default"},
        {"default": {"minItems": 10**9}, "$ref": "#/%64efault"},
        {"$id": "http://h/x", "examples": [{"minItems": 10**9}], "anyOf": [{"$ref": "x#/examples/0"}]},
        {"properties": {"properties": {"default": {"minItems": 10**9}}}, "items": {"$ref": "#/properties"}},
        {"%70roperties": {"default": {"minItems": 10**9}}, "items": {"$ref": "#/%70roperties/default"}},
        {
            "properties": {
                "properties": {"default": {"minItems": 10**9}},
                "a": {"$ref": "#/properties//properties/default"},
            }
        },
        {"default": {"minItems": float("inf")}, "$ref": "#/default"},
        {"default": [{"$anchor": "here", "maxItems": 10**9}], "items": {"$dynamicRef": "#here"}},
    ],
)
def test_a_reference_makes_no_schema_of_what_is_none(schema: Any) -> None:
    with pytest.raises(
        RequestRefusedError, match=r"a value of the schema has an array of [0-9a-z]+ items; to it .* may lead"
    ) as refused:
        bounded(schema)
    assert refused.value.param == "sampling.structured_outputs"


@pytest.mark.parametrize("reference", ["#", "#/$defs/enum", "#/properties/default/items", "#anchor", "x", "#/default"])
def test_references_are_left(reference: str) -> None:
    defs = {"enum": {"items": {"$ref": "#"}}}
    schema = {"items": {"$ref": reference}, "default": [{"maxItems": MOST}], "$defs": defs}
    assert bounded(schema) == schema


@pytest.mark.parametrize("reference", ["#", "#/$defs/default", "#/definitions/A"])
def test_a_value_is_a_value_where_references_are_plain(reference: str) -> None:
    schema = {"items": {"$ref": reference}, "const": {"minItems": 10**9}}
    assert bounded(schema) == schema


def test_what_a_reference_may_make_a_schema_of_counts() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    schema = {"examples": [{"maxItems": 200_000}] * 6, "items": {"$ref": "#/examples/0"}}
    with pytest.raises(RequestRefusedError, match="may have 1200000 items in all;"):
        bound(StructuredOutputsParams(json=schema), 10**6)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "array", "maxItems": 1000000000, "uniqueItems": true}',
        'start: "a" | %json\n{"items": {"minItems": 1e300}} "b"',
        'start: %json {"maxItems": 600000} %json{"maxItems": 600000}',
        'start: "%json [" %json {",": ",", "minItems": 1000000000} "]"',
    ],
)
def test_schemas_within_a_grammar_count(grammar: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    with pytest.raises(RequestRefusedError, match="items in all; at most 1000000") as refused:
        bound(StructuredOutputsParams(grammar=grammar), MAX_TOKENS)
    assert refused.value.param == "sampling.structured_outputs"


@pytest.mark.parametrize("grammar", ['start: "a"', 'start: %json {"maxItems": 99}', 'start: "%json" "["', "%json @x"])
def test_other_grammars_stay(grammar: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    from services.worker.vllm.structured import bound

    wanted = StructuredOutputsParams(grammar=grammar)
    bound(wanted, MAX_TOKENS)
    assert wanted.grammar == grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#", "type": "string"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/definitions/a", "definitions": {"a": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}]},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#"}], "type": "string"},
        {"allOf": [{"anyOf": [{"$ref": "#"}]}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_a_schema_that_is_only_itself_is_refused(schema: Any) -> None:
    with pytest.raises(RequestRefusedError, match="refers only to itself") as refused:
        bounded(schema)
    assert (refused.value.code, refused.value.param) == ("invalid_parameter", "sampling.structured_outputs")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"next": {"$ref": "#/$defs/a"}}}}},
        {"$ref": "#/$defs/a", "$defs": []},
        {"$ref": "#/$defs/a"},
        {"$ref": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#anchor"}]},
        {"anyOf": [{"$ref": "#"}, True]},
        {"anyOf": []},
        {"anyOf": {"$ref": "#"}},
        {"properties": {"next": {"$ref": "#"}}},
        True,
    ],
)
def test_one_that_says_something_first_is_left(schema: Any) -> None:
    assert bounded(schema) == schema
