"""Messages reach the template as they do in vLLM's own server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import PromptSpec, Rendered
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
    from services.worker.vllm_engine import prepare

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

    from services.worker.vllm_tools import chat_request

    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*[{"role": "user", "name": 1}] * 2000, {**SAID, "tool_calls": [call, call]}, SAID]
    tools = pb.ToolUse(tools_json=json.dumps([{"type": "function", "function": {"name": "f"}}]))
    request = chat_request(pb.ChatPrompt(messages_json=json.dumps(messages), tools=tools))
    assert count_history_tool_calls(request) == 2, "some parsers number their calls after those"
    assert len(request.messages) == 1
