"""Forms that end vLLM's readers of grammars, or hold them up, before a tokenizer process of real vLLM.

`python -m tests.support.vllm_form_death MODEL` prints what became of each prompt. Of the bounds of structured outputs,
which would refuse all of them, there is none here: they stand for what the bounds do not know.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.request.v1 import request_pb2 as pb
from penstock.tiny_model import make_tiny_model
from services.worker.engine import Rendered
from services.worker.tokenizer import TokenizerPool
from services.worker.vllm.engine import prepare
from services.worker.wire import prompt_spec
from tests.support.answered import Answered

ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
LEVELS = 4000


def deep() -> Any:
    """Return a schema whose references lead so far down that the stack of llguidance is full."""
    defs: dict[str, Any] = {f"a{n}": {"properties": {"p": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(LEVELS)}
    return {
        "type": "object",
        "$ref": "#/$defs/a0",
        "$defs": defs | {f"a{LEVELS}": {"type": "integer", "multipleOf": 3}},
    }


def slow() -> Any:
    """Return a schema that vLLM looks at for seconds."""
    names = [f"k{number}" for number in range(40)]
    fields = {name: {"type": "string", "pattern": f"^[a-z ]{{1,{2000 + at}}}$"} for at, name in enumerate(names)}
    return {"type": "object", "properties": fields, "required": names}


def shaped(schema: Any) -> pb.Request:
    """Return a request for an output of this shape."""
    return pb.Request(
        text="a gate",
        sampling=pb.SamplingParams(
            max_tokens=9, structured_outputs=pb.StructuredOutputs(json_schema=json.dumps(schema))
        ),
    )


def calling(schema: Any) -> pb.Request:
    """Return a request that must call a function of these parameters."""
    tools = json.dumps([{"type": "function", "function": {"name": "clock", "strict": True, "parameters": schema}}])
    chat = pb.ChatPrompt(
        messages_json='[{"role": "user", "content": "a gate"}]',
        tools=pb.ToolUse(tools_json=tools, tool_choice_json='"required"'),
    )
    return pb.Request(chat=chat, sampling=pb.SamplingParams(max_tokens=9))


async def answers(pool: TokenizerPool, requests: dict[str, pb.Request]) -> dict[str, Any]:
    """Return what became of each."""
    answered = Answered()
    await pool.start(answered.answer, answered.died)
    for name, request in requests.items():
        pool.render(name, prompt_spec(request))
    async with asyncio.timeout(180):
        while len(answered.answers) < len(requests) and not answered.deaths:
            await asyncio.sleep(0.05)
    await pool.close()
    assert not answered.deaths
    return {
        name: "rendered" if isinstance(answer, Rendered) else tuple(answer) for name, answer in answered.answers.items()
    }


def main(model: Path) -> None:
    """Print the answers of a process that may look at anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_tiny_model(model)
    prepared = prepare(str(model), ("tiny",), ARGUMENTS, "hermes")
    with patch("services.worker.vllm.understanding.bound"), patch("services.worker.tokenizer.FORM_CPU_S", 2.0):
        pool = TokenizerPool.fork(prepared.make_renderer)
    fine = {"type": "object", "properties": {"utc": {"type": "boolean"}}}
    requests = {
        "plain": pb.Request(text="a gate"),
        "deep": shaped(deep()),
        "shaped": shaped(fine),
        "slow tool": calling(slow()),
        "calling": calling(fine),
    }
    with patch("services.worker.tokenizer.FORM_CPU_S", 2.0):
        print(asyncio.run(answers(pool, requests)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
