"""What a worker without a tool parser says to a request for function calls: that it needs one, as vLLM's does."""

from __future__ import annotations

import json

from services.worker.engine import PromptSpec, RequestRefusedError

REMEDY = "requires --tool-call-parser to be set where the worker is started (--tool-call-parser hermes, for example)"
"""What is to be done; `--enable-auto-tool-choice`, which vLLM's server names as well, the parser means alone."""


def refuse_calls(spec: PromptSpec) -> None:
    """Raise RequestRefusedError if calls would have to be read out of the output of a chat."""
    if not spec.tools_json or spec.tool_choice_json == '"none"':
        return
    choice = json.loads(spec.tool_choice_json or '"auto"')
    if choice == "auto":
        text = f'"auto" tool choice {REMEDY}'
    else:
        wanted = f'function "{choice["function"]["name"]}"' if isinstance(choice, dict) else f'"{choice}"'
        text = f"tool_choice={wanted} {REMEDY}"
    raise RequestRefusedError("unsupported_parameter", text, "tool_choice")
