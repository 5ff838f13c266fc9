"""Messages reach the template as they do in vLLM's own server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import PromptSpec, Rendered, RequestRefusedError
from services.worker.untrusted import refuse_variables
from tests.contract.worker.conftest import VLLM_ARGUMENTS
from tests.support.fleet import penstock

pytestmark = pytest.mark.vllm

TEMPLATE = "{% for m in messages %}[{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
SAID = {"role": "assistant", "content": "Seven."}


def test_what_was_thought_is_shown_under_either_name(tmp_path: Path) -> None:
    """Clients send `reasoning_content`, the older name, and vLLM's renderer by itself knows the newer one alone."""
    model = tmp_path / "tiny"
    assert penstock("tiny-model", str(model)).returncode == 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from services.worker.vllm.engine import prepare

    renderer = prepare(str(model), ("tiny",), VLLM_ARGUMENTS, trusts_templates=True).make_renderer()

    def shown(message: dict[str, Any]) -> str | None:
        spec = PromptSpec(messages_json=json.dumps([message]), chat_template=TEMPLATE, want_text=True)
        rendered: Rendered = renderer.render(spec)
        return rendered.text

    assert shown({**SAID, "reasoning": "3 + 4"}) == "[3 + 4|3 + 4|Seven.]"
    assert shown({**SAID, "reasoning_content": "3 + 4"}) == "[3 + 4|3 + 4|Seven.]"
    assert shown({**SAID, "reasoning": "3 + 4", "reasoning_content": "no"}) == "[3 + 4|3 + 4|Seven.]"
    assert shown({**SAID, "reasoning_content": None}) == "[||Seven.]"


def test_a_history_is_not_checked_again_for_its_calls() -> None:
    """vLLM's model of a body notes each wrong message many times over, and it is made where every run is told of."""
    from vllm.parser.utils import count_history_tool_calls

    from services.worker.vllm.parsing import chat_request

    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*[{"role": "user", "name": 1}] * 2000, {**SAID, "tool_calls": [call, call]}, SAID]
    tools = pb.ToolUse(tools_json=json.dumps([{"type": "function", "function": {"name": "f"}}]))
    request = chat_request(pb.ChatPrompt(messages_json=json.dumps(messages), tools=tools))
    assert count_history_tool_calls(request) == 2, "some parsers number their calls after those"
    assert len(request.messages) == 1


def test_a_chat_that_is_nested_too_deeply_to_be_read_is_refused() -> None:
    from services.worker.vllm.parsing import chat_request

    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    with pytest.raises(RequestRefusedError, match="nested too deeply") as refused:
        chat_request(pb.ChatPrompt(messages_json="[]", chat_template_kwargs_json=deep))
    assert (refused.value.code, refused.value.param) == ("invalid_prompt", "messages")


def test_mistrals_tokenizer_gets_ids_of_calls_as_vllms_server_cuts_them() -> None:
    from vllm.tokenizers.mistral import truncate_tool_call_ids

    from services.worker.vllm.renderer import shorten_call_ids

    calls = [{"id": "call_abcdefghijklmnop", "function": {}}, {"id": "123456789", "function": {}}]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    ours: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {**SAID, "tool_calls": calls}, *answers]
    theirs = json.loads(json.dumps(ours))
    truncate_tool_call_ids(cast("Any", SimpleNamespace(messages=theirs)))
    shorten_call_ids(ours)
    assert ours == theirs
    shorten_call_ids([{**SAID, "tool_calls": None}, {**SAID, "tool_calls": [7]}, {"role": "tool", "tool_call_id": 7}])


def test_variables_are_refused_where_no_template_could_use_them() -> None:
    refuse_variables({"enable_thinking": True, "reasoning_effort": "low", "documents": []})
    with pytest.raises(RequestRefusedError, match="tone") as refused:
        refuse_variables({"reasoning_effort": "low", "tone": 1})
    assert refused.value.param == "chat_template_kwargs"
