"""Tokens that were added to a tokenizer and not to the model: vLLM takes them, and its engine ends where it meets one.

Many a fine-tuned model has them, `[PAD]` or the marks of a chat, with an embedding that was not resized.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.tiny_model import make_tiny_model
from services.worker.engine import PromptSpec, RequestRefusedError
from tests.contract.worker.conftest import renderers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

TOKENS = 2048
"""Of the tiny model; the next id is that of the added token."""
ADDED = "[PAD]"
CHAT = json.dumps([{"role": "user", "content": f"hello {ADDED}"}])


def with_added_token(model: Path) -> Path:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(
        {"id": TOKENS, "content": ADDED, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    )  # fmt: skip
    file.write_text(json.dumps(tokenizer))
    return model


def test_a_token_without_an_embedding_is_refused_in_whatever_it_comes(tmp_path: Path) -> None:
    prompts = {
        "prompt": [PromptSpec(text=f"hello {ADDED}"), PromptSpec(token_ids=(5, TOKENS, 7))],
        "messages": [PromptSpec(messages_json=CHAT)],
    }
    for renderer in renderers(with_added_token(make_tiny_model(tmp_path / "tiny"))):
        assert renderer.render(PromptSpec(token_ids=(5, TOKENS - 1, 7))).token_ids.tolist() == [5, TOKENS - 1, 7]
        assert renderer.render(PromptSpec(text="hello PAD")).token_ids
        for where, specs in prompts.items():
            for spec in specs:
                with pytest.raises(RequestRefusedError, match=f"Token id {TOKENS} .* has {TOKENS} tokens") as caught:
                    renderer.render(spec)
                assert (caught.value.code, caught.value.param) == ("invalid_prompt", where)


def test_vllm_itself_takes_such_a_token(tmp_path: Path) -> None:
    """Once it does not, this check has no use."""
    renderer, _ = renderers(with_added_token(make_tiny_model(tmp_path / "tiny")))
    renderer._renderer._renderer.validate_token_ids([5, TOKENS, 7])  # type: ignore[attr-defined]
