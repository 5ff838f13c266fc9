"""The `openai` client asks the gateway and vLLM's own server the same: the answers agree field by field.

What may differ is named here, and justified in docs/openai.md.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.support.batch_lines import words
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(300)]

OWN = {"id", "created", "system_fingerprint", "prompt_tokens_details"}
"""Fields whose values are each server's own."""

STOPPING = {"max_tokens": 48, "stop": ["e", "zz"], "extra_body": {"min_tokens": 4}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 24},
    "one token": {"max_tokens": 1},
    "stop": STOPPING,
    "kept stop": {**STOPPING, "extra_body": {"include_stop_str_in_output": True}},
    "logprobs": {"max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    "penalties": {"max_tokens": 24, "presence_penalty": 1.5, "extra_body": {"repetition_penalty": 1.3}},
    "n": {"max_tokens": 8, "n": 3, "temperature": 0.8, "seed": 7},
    "seed": {"max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "seed": 11},
    "bias": {"max_tokens": 6, "logit_bias": {"300": 100}},
    "choice": {"max_tokens": 12, "extra_body": {"structured_outputs": {"choice": ["river", "gate"]}}},
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Nîmes", "Oslo"]}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
]


def forced(*elements: str | dict[str, Any]) -> dict[str, Any]:
    """Return the response format of an output that is these texts and JSON values, whatever the model would say."""
    parts = [
        {"type": "const_string", "value": part}
        if isinstance(part, str)
        else {"type": "json_schema", "json_schema": part}
        for part in elements
    ]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}


ONE_CALL = ('<tool_call>\n{"name": "weather", "arguments": ', WEATHER, "}\n</tool_call>")
OTHER_CALL = ('\n<tool_call>{"name": "clock", "arguments": ', CLOCK, "}</tool_call>")
CALLING: dict[str, dict[str, Any]] = {
    "none": {"max_tokens": 16, "tool_choice": "none"},
    "auto, and it only talks": {"max_tokens": 24},
    "auto": {"max_tokens": 200, "response_format": forced("I look: ", *ONE_CALL)},
    "auto, cut short": {"max_tokens": 20, "response_format": forced(*ONE_CALL)},
    "auto, two calls": {"max_tokens": 300, "tool_choice": "auto", "response_format": forced(*ONE_CALL, *OTHER_CALL)},
    "auto, the first of two": {
        "max_tokens": 300, "response_format": forced(*ONE_CALL, *OTHER_CALL), "parallel_tool_calls": False,
    },
    "one function": {"max_tokens": 64, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "required": {"max_tokens": 96, "tool_choice": "required"},
    "required, once": {"max_tokens": 96, "tool_choice": "required", "parallel_tool_calls": False},
    "required, of several": {"max_tokens": 64, "tool_choice": "required", "n": 2, "temperature": 0.7, "seed": 3},
    "a call answered": {
        "max_tokens": 12,
        "messages": [
            {"role": "user", "content": "and now?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}]},
            {"role": "tool", "tool_call_id": "call-1", "content": "12:00"},
        ],
    },
}  # fmt: skip
"""Chats that offer TOOLS; the tool parser is Hermes'. Those whose calls never end are cut within the first one's
arguments: how much is told of a second whose name has just come is chance (CUT_SHORT)."""
CHATS |= {f"tools: {name}": {"tools": TOOLS, **fields} for name, fields in CALLING.items()}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 24},
    "default length": {},
    "unicode": {"prompt": "naïve café – Ünïcödé 水車 🚰", "max_tokens": 32},
    "token ids": {"prompt": [5, 300, 301, 302], "max_tokens": 8},
    "stop": STOPPING,
    "logprobs": {"max_tokens": 6, "logprobs": 2},
    "n": {"max_tokens": 8, "n": 2, "temperature": 0.8, "seed": 7},
    "several": {"prompt": [words(3, 9), "Ünïcödé", words(4, 30)], "max_tokens": 12},
    "several token lists": {"prompt": [[5, 300, 301], [302]], "max_tokens": 6, "logprobs": 1},
    "several, n each": {"prompt": ["one", "two"], "max_tokens": 8, "n": 2, "temperature": 0.8, "seed": 7},
    "a list of one": {"prompt": [words(3, 9)], "max_tokens": 8},
}
WHOLE: dict[str, dict[str, Any]] = {
    "echo": {"max_tokens": 4, "extra_body": {"echo": True}},
    "echo with logprobs": {"max_tokens": 4, "logprobs": 1, "echo": True},
    "prompt logprobs": {"max_tokens": 2, "extra_body": {"prompt_logprobs": 1}},
    "several, echoed": {"prompt": ["one", "two three"], "max_tokens": 4, "logprobs": 1, "echo": True},
}
"""What is not available in a stream."""


@pytest.fixture(scope="module")
def bases(vllm_fleet: Fleet, vllm_reference: str) -> Iterator[list[str]]:
    """Yield the base addresses of gateway and reference."""
    addresses = ["--queue-address", vllm_fleet.queue.address, "--scheduler-address", vllm_fleet.scheduler.address]
    gateway = vllm_fleet.add("gateway", addresses)
    gateway.start()
    yield [f"http://{gateway.address}/v1", f"{vllm_reference}/v1"]
    gateway.stop()


def client_of(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0)


def settings_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, greedy unless said otherwise."""
    prompt: dict[str, Any] = {"prompt": words(3, 9)}
    if kind == "chat":
        prompt = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": words(3, 9)}]}
    return {"model": "tiny", "temperature": 0.0, **prompt, **fields}


def create(client: Any, kind: str, **fields: Any) -> Any:
    """Ask a sync or async client."""
    where = client.chat.completions if kind == "chat" else client.completions
    return where.create(**settings_of(kind, fields))


def comparable(value: Any) -> Any:
    """Return a response without what is each server's own; numbers to six digits."""
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items() if name not in OWN}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


CASES = [("chat", name) for name in CHATS] + [("text", name) for name in TEXTS]


CUT_SHORT = "tools: auto, cut short"
"""As long as a call has no argument yet, vLLM's parser tells of none or of an empty set of them, depending on how many
tokens come to it at once, which is chance on both servers."""


def fields_of(kind: str, name: str) -> dict[str, Any]:
    return {**WHOLE, **(CHATS if kind == "chat" else TEXTS)}[name]


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "name"), [*(("text", name) for name in WHOLE), *CASES])
def test_whole_answers_agree(bases: list[str], kind: str, name: str) -> None:
    ours, theirs = (create(client_of(base), kind, **fields_of(kind, name)).model_dump() for base in bases)
    assert comparable(ours) == comparable(theirs)
    assert ours.keys() == theirs.keys()


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what a stream says of each choice: text, log probabilities, role and end, whatever its chunk borders."""
    said: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            empty = {"text": "", "roles": [], "logprobs": [], "offsets": [], "ends": [], "calls": {}}
            one = said.setdefault(choice["index"], empty)
            delta = choice.get("delta") or {}
            for call in delta.get("tool_calls") or []:
                known = one["calls"].setdefault(call["index"], {"type": call.get("type"), "name": "", "arguments": ""})
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
            one["text"] += choice.get("text") or delta.get("content") or ""
            one["roles"] += [delta["role"]] if delta.get("role") else []
            logprobs = choice["logprobs"] or {}
            one["logprobs"] += logprobs.get("content") or logprobs.get("top_logprobs") or []
            one["offsets"] += logprobs.get("text_offset") or []
            if choice["finish_reason"]:
                one["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    return said


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_streams_agree(bases: list[str], kind: str, name: str) -> None:
    streams = []
    for base in bases:
        stream = create(
            client_of(base), kind, **fields_of(kind, name), stream=True, stream_options={"include_usage": True}
        )
        streams.append([chunk.model_dump(exclude_unset=True) for chunk in stream])
    ours, theirs = streams
    told = [joined(stream) for stream in streams]
    if name == CUT_SHORT:
        for call in (call for said in told for choice in said.values() for call in choice["calls"].values()):
            assert call.pop("arguments") in {"", "{}"}
    assert comparable(told[0]) == comparable(told[1])
    assert comparable(ours[-1]["usage"]) == comparable(theirs[-1]["usage"])
    assert {*ours[-1]} == {*theirs[-1]} - {"system_fingerprint"}
    assert ours[0].keys() == theirs[0].keys(), "the first chunk"
    for mine, other in ((ours[0], theirs[0]), (ours[-2], theirs[-2])):
        assert mine["choices"][0].keys() == other["choices"][0].keys(), "the first and the last choice"
    assert len({chunk["id"] for chunk in ours}) == 1


def test_calls_are_made(bases: list[str]) -> None:
    """What the comparisons compare is not nothing, and a stream's answer can be had again, with its calls' names."""
    answer = create(client_of(bases[0]), "chat", **CHATS["tools: auto, two calls"])
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "clock"]
    assert json.loads(calls[0].function.arguments)["city"] in WEATHER["properties"]["city"]["enum"]  # type: ignore[index]
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = list(create(client_of(bases[0]), "chat", **CHATS["tools: auto"], stream=True))
    names = [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id]
    request_id = chunks[0].id.removeprefix("chatcmpl-")
    kept: Any = client_of(bases[0]).get(f"/requests/{request_id}", cast_to=object)
    message = kept["response"]["body"]["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == names
    assert message["content"] == "I look: "


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"tools": []}, "tools"), ({"tool_choice": "auto"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
     ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
     ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice")],
)  # fmt: skip
def test_wrong_tools_are_refused_alike(bases: list[str], fields: dict[str, Any], param: str) -> None:
    for base in bases:
        with pytest.raises(openai.BadRequestError) as refused:
            create(client_of(base), "chat", **fields)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": -1}, "max_tokens"), ({"model": "no"}, "model"), ({"prompt": words(1, 2000)}, None),
     ({"temperature": -1}, "temperature"), ({"prompt": words(1, 2000), "stream": True}, None),
     ({"prompt": ["x", words(1, 2000)]}, None)],
)  # fmt: skip
def test_refusals_are_the_same_exceptions(bases: list[str], fields: dict[str, Any], param: str | None) -> None:
    kinds = []
    for base in bases:
        with pytest.raises(openai.APIStatusError) as refused:
            create(client_of(base), "text", **fields)
        kinds.append(type(refused.value))
        if param:
            assert refused.value.param == param
    assert kinds[0] is kinds[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_completion_tokens": 99_999}, "max_completion_tokens"), ({"max_tokens": 99_999}, "max_tokens"),
     ({"messages": [{"role": "user", "content": words(1, 2000)}]}, "messages"),
     ({"logprobs": True, "top_logprobs": 50}, "top_logprobs")],
)  # fmt: skip
def test_what_is_too_much_is_named_as_the_body_has_it(bases: list[str], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client_of(bases[0]), "chat", **fields)
    assert refused.value.param == param
    assert not {"max_tokens", "max_completion_tokens"} & set(re.findall(r"\w+", str(refused.value.body))) - {param}


async def test_the_async_client_many_at_once(bases: list[str]) -> None:
    """Half of them streams, against the same questions asked of the reference."""

    async def text_of(client: openai.AsyncOpenAI, number: int) -> str:
        fields = {"max_tokens": 4 + number, "messages": [{"role": "user", "content": words(number, 5)}]}
        if number % 2:
            answer = await create(client, "chat", **fields)
            return str(answer.choices[0].message.content)
        stream = await create(client, "chat", **fields, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = []
    for base in bases:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            answers.append(await asyncio.gather(*(text_of(client, number) for number in range(16))))
    assert answers[0] == answers[1]


def test_models_and_the_request_id(bases: list[str]) -> None:
    listed = [[model.model_dump() for model in client_of(base).models.list()] for base in bases]
    ours, theirs = ([(model["id"], model["max_model_len"]) for model in models] for models in listed)
    assert ours == theirs == [("tiny", 512)]
    raw = client_of(bases[0]).completions.with_raw_response.create(**settings_of("text", {"max_tokens": 2}))
    assert raw.parse().id == f"cmpl-{raw.headers['x-request-id']}"


def test_a_stream_that_is_closed_is_cancelled(bases: list[str]) -> None:
    client = client_of(bases[0])
    states: list[str] = []
    # On a busy machine a run of a second may have ended before anybody has noticed that its client left.
    while "cancelled" not in states and states.count("completed") < 10:
        stream = create(client, "chat", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
        request_id = next(stream).id.removeprefix("chatcmpl-")
        stream.close()
        states.append("")
        while states[-1] not in {"cancelled", "completed"}:
            states[-1] = client.get(f"/requests/{request_id}", cast_to=object)["status"]  # type: ignore[index]
    assert states[-1] == "cancelled"


def test_the_answers_of_a_batch_are_those_of_single_requests(bases: list[str]) -> None:
    client = client_of(bases[0])
    bodies = {name: settings_of("chat", CHATS[name]) for name in ("plain", "logprobs", "seed", "choice", "tools: auto")}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                **{key: value for key, value in body.items() if key != "extra_body"},
                **body.get("extra_body", {}),
            },
        }
        for name, body in bodies.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ends = {"completed", "failed", "expired", "cancelled"}
    wait_for(lambda: client.batches.retrieve(batch.id).status in ends, "the batch to end", 120)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed", done
    assert done.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == set(bodies)
    for answer in answers:
        one = client.chat.completions.create(**bodies[answer["custom_id"]])
        same = ChatCompletion.model_validate(answer["response"]["body"])
        assert comparable(same.model_dump()) == comparable(one.model_dump())
