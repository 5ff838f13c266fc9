"""Log probabilities of the same engine output, written by vLLM's server and here."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.openai.logprobs import chat_logprobs, completion_logprobs
from penstock.openai.shape import Shape

TOKENS = {1: "a", 2: "bé", 3: "\ufffd", 4: " dd"}
SAMPLED = [3, 1]
LIKELIEST = [[(1, -0.1), (2, -1.0)], [(1, -0.2), (4, float("-inf"))]]
LOGPROBS = [-5.0, -0.2]


def reported(top: int) -> list[dict[int, tuple[float, int]]]:
    """Return what the engine reports of each position: the sampled token first, then the `top` likeliest."""
    found = []
    for token_id, logprob, likeliest in zip(SAMPLED, LOGPROBS, LIKELIEST, strict=True):
        entries = {token_id: (logprob, 4 if token_id == 3 else 1)}
        entries |= {other: (value, rank) for rank, (other, value) in enumerate(likeliest[: 2 if top < 0 else top], 1)}
        found.append(entries)
    return found


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("top", [0, 1, 2, -1])
def test_log_probabilities_are_written_as_vllms_server_does(top: int, as_ids: bool) -> None:
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.serving").OpenAIServingChat
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.serving").OpenAIServingCompletion
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    from services.worker.outputs import RunOutput
    from services.worker.vllm.sampling import engine_step
    from tests.support.results import result_of

    positions = [
        {token_id: Logprob(value, rank, TOKENS[token_id]) for token_id, (value, rank) in entries.items()}
        for entries in reported(top)
    ]
    server: Any = SimpleNamespace(return_tokens_as_token_ids=False, _get_decoded_token=chat._get_decoded_token)
    server._get_top_logprobs = lambda *args, **named: chat._get_top_logprobs(server, *args, **named)
    output = RequestOutput("r", None, [9], None, [CompletionOutput(0, "", SAMPLED, None, positions)], True)
    run = RunOutput()
    run.take(engine_step(output, top))
    ours = result_of(run).choices[0].logprobs

    theirs = chat._create_chat_logprobs(server, SAMPLED, positions, None, top, None, as_ids)
    shape = Shape(chat=True, logprobs=top, tokens_as_ids=as_ids)
    assert json.dumps(chat_logprobs(ours, shape)) == json.dumps(theirs.model_dump())
    theirs = completion._create_completion_logprobs(server, SAMPLED, positions, top, None, None, 0, as_ids)
    shape = Shape(chat=False, logprobs=top, tokens_as_ids=as_ids)
    assert json.dumps(completion_logprobs(ours, shape)) == json.dumps(theirs.model_dump())
