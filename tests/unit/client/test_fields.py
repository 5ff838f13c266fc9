"""Named fields become the wire request, or an error that names the field."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.fields import LISTS, PLAIN, SCALARS, SETTERS, RequestFields, build_request
from penstock.request.v1 import request_pb2 as pb


def build(**fields: Any) -> pb.Request:
    return build_request(RequestFields(**fields))  # type: ignore[typeddict-item]


def test_every_field_of_the_wire_request_can_be_said() -> None:
    said = set(SETTERS) | {"prompt", "messages"}
    unsaid = {"text", "token_ids", "chat", "sampling", "request_id"}
    assert {field.name for field in pb.Request.DESCRIPTOR.fields} - unsaid <= said
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {"extra_args_json"}
    assert sampling <= said
    assert set(RequestFields.__annotations__) >= said - {"messages", "prompt"}
    assert set(PLAIN) | set(SCALARS) | set(LISTS) <= said


def test_a_deadline_in_seconds_counts_from_now() -> None:
    before_ns = time.time_ns()
    deadline_ns = build(prompt="p", deadline_s=2.5).deadline_unix_ns
    assert before_ns <= deadline_ns - 2_500_000_000 <= time.time_ns()


@pytest.mark.parametrize(
    ("name", "meant"), [("prompt_token_ids", "prompt"), ("max_token", "max_tokens"), ("temprature", "temperature")]
)
def test_an_unknown_field_comes_first_and_names_the_likely_one(name: str, meant: str) -> None:
    for value in (1, None):
        with pytest.raises(
            InvalidRequest, match=rf"^{name}: there is no such field; did you mean {meant}\?$"
        ) as refused:
            build(**{name: value})
        assert refused.value.code == "unknown_field"
    with pytest.raises(InvalidRequest, match=r"no such field$"):
        build(zzzzzz=1)


def test_none_means_not_said() -> None:
    assert build(prompt="p", max_tokens=None, stop=None) == pb.Request(text="p")


def test_structured_values() -> None:
    request = build(
        messages=[{"role": "user", "content": "é"}], logit_bias={3: 1.5}, extra_args={"a": 1}, stop="x",
        structured_outputs={"json_schema": {"type": "object"}, "disable_any_whitespace": True},
        chat_template_kwargs={"k": True}, add_generation_prompt=False,
    )  # fmt: skip
    assert json.loads(request.chat.messages_json) == [{"role": "user", "content": "é"}]
    assert json.loads(request.sampling.extra_args_json) == {"a": 1}
    assert request.sampling.structured_outputs.disable_any_whitespace
    assert request.chat.HasField("add_generation_prompt")
    assert build(prompt=[1, 2], add_special_tokens=False).sampling.HasField("add_special_tokens")


def test_an_answer_is_read_as_a_message_for_who_says_so() -> None:
    assert build(messages=[], as_message=True).chat.HasField("as_message")
    assert not build(messages=[], as_message=False).chat.HasField("as_message")
    assert not build(messages=[]).chat.HasField("as_message")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "p", "messages": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": b"Once upon"}, "prompt"),
        ({"prompt": bytearray(b"Once upon")}, "prompt"),
        ({"prompt": memoryview(b"Once upon")}, "prompt"),
        ({"prompt": b""}, "prompt"),
        ({"prompt": {1: 2}}, "prompt"),
        ({"prompt": {9, 5, 1}}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": array("d", [0.5])}, "prompt"),
        ({"prompt": array("I")}, "prompt"),
        ({"prompt": "p", "stop_token_ids": b"ab"}, "stop_token_ids"),
        ({"prompt": "p", "allowed_token_ids": {1: 2}}, "allowed_token_ids"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": object()}]}, "messages"),
        ({"prompt": "p", "chat_template": "x"}, "chat_template"),
        ({"prompt": "p", "as_message": True}, "as_message"),
        ({"messages": [], "as_message": "yes"}, "as_message"),
        ({"prompt": "p", "unknown": 1}, "unknown"),
        ({"prompt": "p", "deadline_s": 1, "deadline_unix_ns": 1}, "deadline_s"),
        ({"prompt": "p", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "p", "deadline_s": float("nan")}, "deadline_s"),
        ({"prompt": "p", "deadline_s": "soon"}, "deadline_s"),
        ({"prompt": "p", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "p", "temperature": "hot"}, "temperature"),
        ({"prompt": "p", "bad_words": "word"}, "bad_words"),
        ({"prompt": "p", "stop": [1]}, "stop"),
        ({"prompt": "p", "stop": {"a": 1}}, "stop"),
        ({"prompt": "p", "temperature": 10**400}, "temperature"),
        ({"prompt": "p", "logit_bias": {float("inf"): 1}}, "logit_bias"),
        ({"prompt": "p", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "p", "logit_bias": 5}, "logit_bias"),
        ({"messages": [], "chat_template": 5}, "chat_template"),
        ({"messages": [], "chat_template_kwargs": {"name": "\ud83d"}}, "chat_template_kwargs"),
        ({"messages": [], "chat_template_kwargs": {"name": object()}}, "chat_template_kwargs"),
        ({"messages": [], "continue_final_message": "no"}, "continue_final_message"),
        ({"messages": [], "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"messages": [], "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"prompt": "p", "structured_outputs": {"choice": "positive"}}, "structured_outputs"),
        ({"prompt": "p", "structured_outputs": {}}, "structured_outputs"),
        ({"prompt": "p", "structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"prompt": "p", "structured_outputs": {"shape": 1}}, "structured_outputs.shape"),
        ({"prompt": "p", "structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "value", "range_told"),
    [
        ("priority", 2**31, f"{-(2**31)} to {2**31 - 1}"),
        ("priority", -(10**30), f"{-(2**31)} to {2**31 - 1}"),
        ("seed", 2**63, f"{-(2**63)} to {2**63 - 1}"),
        ("max_tokens", -1, f"0 to {2**32 - 1}"),
        ("deadline_unix_ns", 2**63, f"{-(2**63)} to {2**63 - 1}"),
        ("stop_token_ids", [1, 2**32], f"0 to {2**32 - 1}"),
    ],
)
def test_a_number_that_its_field_cannot_hold_is_told_which_it_can(name: str, value: Any, range_told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: takes whole numbers from {range_told} ") as refused:
        build(prompt="p", **{name: value})
    assert (refused.value.param, refused.value.code) == (name, "invalid_request")


@pytest.mark.parametrize("name", ["extra_args", "messages"])
def test_what_is_nested_too_deeply_to_be_written_is_refused(name: str) -> None:
    value: list[Any] = []
    for _ in range(200_000):
        value = [value]
    with pytest.raises(InvalidRequest, match=f"^{name}: is nested too deeply$"):
        build(**{"prompt": "p"} if name == "extra_args" else {}, **{name: [{"a": value}]})
    while value:
        value = value.pop()  # one by one: to free them all at once takes a stack too


class Numbers:
    """Like an array of numpy's or torch's: it says of itself neither that it is empty nor that it is not."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), array("I", [1, 2]), Numbers([1, 2])])
def test_token_ids_may_be_any_list_or_array(ids: Any) -> None:
    assert build(prompt=ids).token_ids.ids == [1, 2]


def test_an_array_of_nothing_is_no_prompt() -> None:
    with pytest.raises(InvalidRequest, match="is empty"):
        build(prompt=Numbers([]))
