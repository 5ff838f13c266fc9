"""Lengths that do not fit the window are told of the parameter that has them: vLLM looks at them with the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import PromptSpec, RequestRefusedError
from tests.contract.worker.conftest import renderers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

CHAT = json.dumps([{"role": "user", "content": "hello"}])


def test_a_length_above_the_window_is_no_fault_of_the_prompt(tmp_path: Path) -> None:
    for renderer in renderers(make_tiny_model(tmp_path / "tiny")):
        for name, spec in (
            ("max_tokens", PromptSpec(text="hello", max_tokens=513)),
            ("max_tokens", PromptSpec(messages_json=CHAT, max_tokens=513)),
            ("truncate_prompt_tokens", PromptSpec(text="hello", truncate_prompt_tokens=513)),
            ("truncate_prompt_tokens", PromptSpec(messages_json=CHAT, truncate_prompt_tokens=513)),
        ):
            with pytest.raises(RequestRefusedError, match=rf"{name}=513 cannot be greater") as caught:
                renderer.render(spec)
            assert (caught.value.code, caught.value.param) == ("invalid_parameter", f"sampling.{name}")
        with pytest.raises(RequestRefusedError) as caught:
            renderer.render(PromptSpec(text="hello " * 5000, max_tokens=1))
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
