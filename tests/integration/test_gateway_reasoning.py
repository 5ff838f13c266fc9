"""Thinking is told apart as vLLM's own server does it, by a real engine: over HTTP, in batches and with run-batch.

The model knows no end of its thoughts; a budget of tokens gives them one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from tests.integration.conftest import ENGINE_FLAGS
from tests.support.batch_lines import words
from tests.support.chat_streams import joined
from tests.support.fleet import ROOT, Fleet, penstock, read_jsonl, write_jsonl
from tests.support.thinking_model import make_thinking_model
from tests.support.vllm_server import VLLM_ENVIRONMENT, vllm_server
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(300)]

URL: Final = "/v1/chat/completions"
PARSERS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
OWN = {"id", "created", "system_fingerprint", "prompt_tokens_details"}
"""Fields whose values are each server's own; so are those of calls, which are drawn."""

ASKED = {"role": "user", "content": words(5, 9)}
"""What the model thinks of it has no character in halves: of such a token vLLM counts none or one, depending on how
many come at once, which is chance on both servers."""

BEGUN = {"chat_template_kwargs": {"begun": True}}
BRIEF = {**BEGUN, "thinking_token_budget": 6, "max_tokens": 24}
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Nîmes", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
AS_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "const_string",
        "value": 'I look: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "it is cut": {**BEGUN, "max_tokens": 12},
    "it thinks and says": BRIEF,
    "hidden": {**BRIEF, "include_reasoning": False},
    "log probabilities": {**BRIEF, "logprobs": True, "top_logprobs": 1},
    "log probabilities, hidden": {**BRIEF, "logprobs": True, "include_reasoning": False},
    "several": {**BRIEF, "n": 2, "temperature": 0.8, "seed": 5},
    "not to think": {"max_tokens": 12, "reasoning_effort": "none"},
    "JSON after the thought": {**BRIEF, **AS_JSON, "max_tokens": 64},
    "JSON without a thought": {"max_tokens": 48, **AS_JSON, "chat_template_kwargs": {"enable_thinking": False}},
    "JSON, hidden": {"max_tokens": 48, **AS_JSON, **BEGUN, "include_reasoning": False},
    "a call": {**BRIEF, "tools": TOOLS, "response_format": CALL, "max_tokens": 96},
    "a call, hidden": {**BEGUN, "tools": TOOLS, "response_format": CALL, "max_tokens": 96, "include_reasoning": False},
    "a required call": {**BRIEF, "tools": TOOLS, "tool_choice": "required", "max_tokens": 96},
    "tools, none to be called": {**BRIEF, "tools": TOOLS, "tool_choice": "none"},
    "thoughts of before": {
        **BRIEF,
        "messages": [
            {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7", "reasoning_content": "3, 4"},
            ASKED,
        ],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_thinking_model(tmp_path_factory.mktemp("model") / "thinking")
    return ["--model", str(model), *ENGINE_FLAGS, *PARSERS]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", flags)
        fleet.add_gateway()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet, flags: list[str]) -> Iterator[list[str]]:
    """Yield the base addresses of gateway and reference."""
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with vllm_server([*flags, "--enable-auto-tool-choice"], log) as reference:
        yield [f"http://{fleet.services['gateway'].address}", reference]


def body_of(name: str) -> dict[str, Any]:
    """Return a body, greedy unless it says otherwise."""
    return {"model": "tiny", "temperature": 0.0, "messages": [ASKED], **CHATS[name]}


def ask(base: str, body: dict[str, Any]) -> str:
    """POST a body and return the text of the answer."""
    request = urllib.request.Request(base + URL, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def comparable(value: Any) -> Any:
    """Return an answer without what is each server's own; numbers to four digits."""
    if isinstance(value, dict):
        kept = {key: comparable(item) for key, item in value.items() if key not in OWN}
        if "function" in value:
            kept.pop("index", None)
        return kept
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("name", CHATS)
def test_whole_answers_agree(bases: list[str], name: str) -> None:
    ours, theirs = (json.loads(ask(base, body_of(name))) for base in bases)
    assert comparable(ours) == comparable(theirs)
    assert list(ours["choices"][0]["message"]) == list(theirs["choices"][0]["message"])


@pytest.mark.parametrize("name", CHATS)
def test_streams_agree(bases: list[str], name: str) -> None:
    body = {**body_of(name), "stream": True, "stream_options": {"include_usage": True}}
    ours, theirs = (
        joined(line.removeprefix("data: ") for line in ask(base, body).splitlines() if line.startswith("data: "))
        for base in bases
    )
    assert comparable(ours) == comparable(theirs)


def test_there_is_something_to_be_compared(bases: list[str]) -> None:
    """What is constrained begins where the reasoning ends; hidden reasoning is nowhere in the answer."""

    def message(name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(ask(bases[0], body_of(name)))["choices"][0]["message"]
        return told

    thought = message("JSON after the thought")
    assert thought["reasoning"]
    assert json.loads(thought["content"])["city"]
    called = message("a call")
    assert called["reasoning"]
    assert called["content"] == "I look: "
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    shown = message("it thinks and says")
    assert shown["reasoning"]
    assert shown["reasoning"] not in ask(bases[0], body_of("hidden"))
    assert message("it is cut")["content"] is None


def test_completions_stay_texts(bases: list[str]) -> None:
    answers = []
    for base in bases:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="<think>\nHm.", max_tokens=12, temperature=0.0)
        assert answer.usage is not None
        answers.append((answer.choices[0].text, answer.usage.completion_tokens_details))
    assert answers[0] == answers[1]


def test_a_stream_is_had_again_as_the_message_it_told(bases: list[str]) -> None:
    lines = [line.removeprefix("data: ") for line in ask(bases[0], {**body_of("a call"), "stream": True}).splitlines()]
    told = joined(line for line in lines if line)["choices"][0]
    name = json.loads(lines[0])["id"].removeprefix("chatcmpl-")
    with urllib.request.urlopen(f"{bases[0]}/v1/requests/{name}") as answer:
        message = json.load(answer)["response"]["body"]["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (told["reasoning"], told["content"])


def lines_of() -> list[dict[str, Any]]:
    return [{"custom_id": name, "method": "POST", "url": URL, "body": body_of(name)} for name in CHATS]


def test_the_lines_of_a_batch_are_answered_alike(bases: list[str]) -> None:
    client = openai.OpenAI(base_url=f"{bases[0]}/v1", api_key="none", max_retries=0)
    content = "".join(json.dumps(line) + "\n" for line in lines_of()).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
    ends = {"completed", "failed", "expired", "cancelled"}
    wait_for(lambda: client.batches.retrieve(batch.id).status in ends, "the batch to end", 120)
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id is not None, done
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == set(CHATS)
    for answer in answers:
        one = json.loads(ask(bases[0], body_of(answer["custom_id"])))
        assert comparable(answer["response"]["body"]) == comparable(one), answer["custom_id"]


def test_run_batch_equals_vllm_run_batch(
    fleet: Fleet, flags: list[str], tmp_path: Path, vllms_answers: Callable[[Path], list[dict[str, Any]]]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", lines_of())
    done = penstock(
        "run-batch", "-i", str(source), "-o", str(tmp_path / "ours.jsonl"),
        "--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + fleet.logs()
    ours, theirs = read_jsonl(tmp_path / "ours.jsonl"), vllms_answers(source)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["custom_id"] == other["custom_id"]
        assert comparable(mine["response"]["body"]) == comparable(other["response"]["body"]), mine["custom_id"]


@pytest.fixture
def vllms_answers(flags: list[str], tmp_path: Path) -> Callable[[Path], list[dict[str, Any]]]:
    """Return what has `vllm run-batch` answer a file."""

    def answered(source: Path) -> list[dict[str, Any]]:
        target = tmp_path / "theirs.jsonl"
        command = [sys.executable, str(ROOT / "tests/support/vllm_run_batch.py"), "-i", str(source), "-o", str(target)]
        done = subprocess.run(
            [*command, *flags, "--enable-auto-tool-choice"],
            env={**os.environ, **VLLM_ENVIRONMENT}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return read_jsonl(target)

    return answered
