"""What a worker says to a request for function calls when it has no tool parser: what vLLM's server says then."""

from __future__ import annotations

import json

from services.worker.engine import PromptSpec, RequestRefusedError


def refuse_calls(spec: PromptSpec) -> None:
    """Raise RequestRefusedError if calls would have to be read out of the output of a chat."""
    if not spec.tools_json or spec.tool_choice_json == '"none"':
        return
    choice = json.loads(spec.tool_choice_json or '"auto"')
    if choice == "auto":
        text = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    else:
        wanted = f'function "{choice["function"]["name"]}"' if isinstance(choice, dict) else f'"{choice}"'
        text = f"tool_choice={wanted} requires --tool-call-parser to be set"
    raise RequestRefusedError("unsupported_parameter", text, "tool_choice")
