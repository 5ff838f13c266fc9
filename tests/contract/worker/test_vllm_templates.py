"""`--chat-template` and `--default-chat-template-kwargs`: what chats are rendered with that say nothing of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import PromptSpec, Renderer, RequestRefusedError
from tests.contract.worker.conftest import renderers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

TEMPLATE = "{% for m in messages %}{{ m.content }}, {{ mood }} {{ place }}{% endfor %}"
VARIABLES = '{"mood": "calm", "place": "here"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def rendered(renderer: Renderer, kwargs: dict[str, Any] | None = None, template: str = "") -> str | None:
    messages = json.dumps([{"role": "user", "content": "hello"}])
    asked = json.dumps(kwargs) if kwargs is not None else ""
    spec = PromptSpec(messages_json=messages, chat_template=template, chat_template_kwargs_json=asked, want_text=True)
    return renderer.render(spec).text


@pytest.mark.parametrize("in_a_file", [True, False])
def test_chats_are_rendered_with_the_workers_template_and_variables(
    model: Path, tmp_path: Path, in_a_file: bool
) -> None:
    given = TEMPLATE
    if in_a_file:
        given = str(tmp_path / "chat.jinja")
        Path(given).write_text(TEMPLATE)
    for renderer in renderers(model, "--chat-template", given, "--default-chat-template-kwargs", VARIABLES):
        assert rendered(renderer) == "hello, calm here"
        assert rendered(renderer, {"mood": "wild"}) == "hello, wild here"
        assert rendered(renderer) == "hello, calm here", "what one chat says is not the next one's"
        with pytest.raises(RequestRefusedError, match="--trust-request-chat-template is not set"):
            rendered(renderer, template="{{ mood }}")


def test_a_trusted_chat_brings_its_own_template_and_is_given_the_variables(model: Path) -> None:
    flags = ["--chat-template", TEMPLATE, "--default-chat-template-kwargs", VARIABLES]
    (renderer,) = renderers(model, *flags, trusts=True)
    assert rendered(renderer, template="{{ mood }}!") == "calm!"
    assert rendered(renderer, {"chat_template": None}) == "hello, calm here"


def test_the_models_own_template_stays_without_them(model: Path) -> None:
    for renderer in renderers(model, "--default-chat-template-kwargs", "{}"):
        assert "<|user|>hello" in (rendered(renderer) or "")
