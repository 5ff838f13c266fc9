"""A tiny model whose tokenizer and template know thinking as Qwen3's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.tiny_model import CHAT_TEMPLATE, make_tiny_model

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own, and none of those that are left out of a text."""

OPENING = (
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% elif begun is defined and begun %}{{ '<think>\n' }}{% endif %}"
    "{% endif %}"
)
"""What the template writes after the assistant's opening: that nothing is to be thought, or, if `begun`, the first mark
of the reasoning."""


def make_thinking_model(directory: Path) -> Path:
    """Write the model to `directory` and return the directory."""
    make_tiny_model(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    ids = range(len(vocabulary) - len(MARKS), len(vocabulary))
    gone = {text for text, token_id in vocabulary.items() if token_id in ids}
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if not gone & {*pair, "".join(pair)}]
    for text in gone:
        del vocabulary[text]
    vocabulary.update(zip(MARKS, ids, strict=True))
    plain: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": text, **plain, "special": False} for text, token_id in zip(MARKS, ids, strict=True)
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    written = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({**written, "chat_template": CHAT_TEMPLATE + OPENING}), encoding="utf-8")
    return directory
