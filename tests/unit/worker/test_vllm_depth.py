"""How deep a schema leads a compiler, by its levels, its references and the brackets of its patterns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.worker.engine import RequestRefusedError
from services.worker.vllm.depth import MOST_BRACKETS, MOST_LEVELS, check_brackets, check_depth, check_patterns


def chain(length: int, reference: str = "#/$defs/a{}", last: Any = None) -> Any:
    """Return a schema of objects that each have one property, which is the next: three levels each."""
    defs: dict[str, Any] = {
        f"a{number}": {"type": "object", "properties": {"p": {"$ref": reference.format(number + 1)}}}
        for number in range(length)
    }
    defs[f"a{length}"] = last or {"type": "integer", "multipleOf": 3}
    return {"$ref": reference.format(0), "$defs": defs}


LONGEST = (MOST_LEVELS - 3) // 3
"""The schema and its `$defs` are two levels, the last object is one."""


def test_a_way_through_references_is_as_long_as_a_stack_allows() -> None:
    check_depth(chain(LONGEST))
    with pytest.raises(
        RequestRefusedError, match=f"leads through {3 * 400 + 3} levels .*; at most {MOST_LEVELS}"
    ) as error:
        check_depth(chain(400))
    assert (error.value.code, error.value.param) == ("invalid_parameter", "sampling.structured_outputs")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(20_000)} | {"20000": True}},
        {"items": {"$ref": "#/x/0"}, "x": [{"anyOf": [{"$ref": f"#/x/{n + 1}"}]} for n in range(600)]},
        chain(400, "#/%24defs/a{}"),
        chain(400, "#/$defs//a{}"),
        {"$ref": "#/a~1b~0/0", "a/b~": {str(n): {"not": {"$ref": f"#/a~1b~0/{n + 1}"}} for n in range(600)}},
        {"anyOf": [{"$anchor": f"a{n}", "items": {"$ref": f"#a{n + 1}"}} for n in range(600)]},
        {
            "$ref": "x#/$defs/a0",
            "$defs": {
                "x": {"$id": "x", "$defs": {f"a{n}": {"not": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(600)}}
            },
        },
        {"$defs": [{"$id": f"x{n}", "$ref": "#/a"} for n in range(200)], "not": {"$ref": "#/b/" + "c/" * 200}}
        | {f"r{n}": {"not": {"$ref": f"#/r{n + 1}/"}} for n in range(200)}
        | {"items": {"items": {"items": {"items": {"items": {}}}}}},
        {"$ref": "x0", "$defs": {str(n): {"$id": f"x{n}", "items": {"$dynamicRef": f"x{n + 1}"}} for n in range(600)}},
    ],
)
def test_however_a_reference_is_written(schema: Any) -> None:
    with pytest.raises(RequestRefusedError, match="levels of objects and arrays, by its references"):
        check_depth(schema)


def test_a_schema_that_leads_to_itself_counts_once() -> None:
    tree = {"properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}}
    check_depth({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    check_depth({"items": {"$ref": "#"}})
    ring = chain(400, last={"$ref": "#/$defs/a0"})
    with pytest.raises(RequestRefusedError, match="leads through"):
        check_depth(ring)


@pytest.mark.parametrize("count", [60, 100, 150])
def test_definitions_that_all_lead_to_each_other_are_no_long_way(count: int) -> None:
    """As FHIR's resources have links, and the nodes of a syntax tree."""
    links = ("left", "right", "up")
    resources: dict[str, Any] = {
        f"r{n}": {
            "properties": {
                link: {"anyOf": [{"$ref": f"#/$defs/r{(n * 7 + at + 1) % count}"}]} for at, link in enumerate(links)
            }
        }
        for n in range(count)
    }
    check_depth({"$ref": "#/$defs/r0", "$defs": resources})


@pytest.mark.parametrize("keyword", ["$id", "$anchor"])
def test_what_is_led_to_by_name_is_as_deep_as_it_is(keyword: str) -> None:
    named = {f"d{n}": {keyword: f"D{n}", "properties": {"x": {"items": {"items": {}}}}} for n in range(400)}
    prefix = "#" if keyword == "$anchor" else ""
    check_depth(
        {
            "$id": "http://h/schema",
            "properties": {f"p{n}": {"$ref": f"{prefix}D{n}"} for n in range(400)},
            "$defs": named,
        }
    )


def test_a_property_that_is_called_id_names_nothing() -> None:
    defs = {f"d{n}": {"properties": {"id": {"type": "string"}, "up": {"$ref": "#"}}} for n in range(400)}
    check_depth({"anyOf": [{"type": "null"}, defs]})


def test_many_short_ways_are_no_long_one() -> None:
    check_depth({"properties": {f"p{n}": {"$ref": "#/$defs/item"} for n in range(5000)}, "$defs": {"item": {}}})
    shapes = {f"s{n}": {"properties": {"next": {"$ref": f"#/$defs/s{n % 7}"}}} for n in range(900)}
    check_depth({"anyOf": [{"$ref": f"#/$defs/{name}"} for name in shapes], "$defs": shapes})


@pytest.mark.parametrize("schema", [True, [], {}, {"$ref": 5}, {"$ref": "#/9"}, {"$ref": f"#/x/{'9' * 9999}", "x": []}])
def test_what_is_odd_is_left(schema: Any) -> None:
    check_depth(schema)
    check_patterns(schema)


def test_references_that_meet_again_and_again_are_followed_once() -> None:
    fans = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(100)}
    check_depth({"$ref": "#/$defs/a0", "$defs": fans | {"a100": {}}})


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "string", "pattern": "{}"}, "a pattern of the schema"),
        ({"properties": {"a": {"items": {"pattern": "{}"}}}}, "a pattern of the schema"),
        ({"patternProperties": {"{}": True}}, "a name in patternProperties"),
        ({"propertyNames": {"pattern": "{}"}}, "a pattern of the schema"),
    ],
)
def test_brackets_of_patterns_are_bounded(schema: Any, what: str) -> None:
    def having(count: int) -> Any:
        return json.loads(json.dumps(schema).replace("{}", "(" * count + "a" + ")" * count))

    check_patterns(having(MOST_BRACKETS))
    with pytest.raises(RequestRefusedError, match=f"{what} has 30000 opening brackets; at most {MOST_BRACKETS}"):
        check_patterns(having(30_000))


def test_a_bracket_that_some_reader_would_not_close_counts() -> None:
    with pytest.raises(RequestRefusedError, match="regex has 2002 opening brackets"):
        check_brackets("([)]" * 1001, "regex")
