"""Lines of OpenAI batch files for tests."""

from __future__ import annotations

from typing import Any

WORDS = (
    "river", "gate", "water", "turbine", "block", "credit", "queue", "wheel",
    "stone", "light", "morning", "answer", "letter", "window", "garden",
)  # fmt: skip


def words(seed: int, count: int) -> str:
    """Return `count` words that differ from seed to seed."""
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(count))


def completion(custom_id: str, prompt: str | list[int], **body: Any) -> dict[str, Any]:
    """Return a /v1/completions line, greedy unless said otherwise."""
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}


def chat(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    """Return a /v1/chat/completions line, greedy unless said otherwise."""
    messages = [{"role": "user", "content": content}]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}


def mixed(count: int, max_tokens: int = 16) -> list[dict[str, Any]]:
    """Return `count` lines, completions and chats in turn, of varied lengths."""
    make = (completion, chat)
    return [make[i % 2](f"line-{i}", words(i, 3 + i % 40), max_tokens=1 + i % max_tokens) for i in range(count)]


def text_of(line: dict[str, Any]) -> str:
    """Return the generated text of an output line."""
    choice = line["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
