"""What the stream of a chat says, whatever its chunk borders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def joined(lines: Iterable[str]) -> dict[str, Any]:
    """Return what a stream says of each choice, in which order, and its token counts; `lines` follow `data: `.

    Names of calls are left out: they are drawn.
    """
    said: dict[str, Any] = {"choices": {}, "usage": None}
    for line in lines:
        if line == "[DONE]":
            continue
        chunk = json.loads(line)
        assert "error" not in chunk, chunk
        said["usage"] = chunk.get("usage")
        for choice in chunk["choices"]:
            nothing = {"content": "", "reasoning": "", "order": [], "calls": {}, "logprobs": [], "ends": []}
            _take(said["choices"].setdefault(choice["index"], nothing), choice)
    return said


def _take(said: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add what one choice of a chunk says."""
    delta = choice["delta"]
    for name in ("reasoning", "content"):
        if delta.get(name):
            said[name] += delta[name]
            said["order"] += [name] if said["order"][-1:] != [name] else []
    for call in delta.get("tool_calls") or []:
        known = said["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
        for name in known:
            known[name] += call["function"].get(name) or ""
    said["logprobs"] += (choice["logprobs"] or {}).get("content") or []
    said["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
