"""Output lines have the shape of vLLM's own responses."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.batch.answers import answer, error_line
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL, parse_body
from penstock.request.v1 import request_pb2 as pb


def entry(token_id: int, logprob: float, *others: tuple[int, float]) -> pb.TokenLogprob:
    made = pb.TokenLogprob(token_id=token_id, token=f"t{token_id}", logprob=logprob, rank=1)
    for other_id, other in ((token_id, logprob), *others):
        made.top.add(token_id=other_id, token=f"t{other_id}", logprob=other, rank=2)
    return made


def result(**fields: Any) -> pb.Result:
    return pb.Result(
        request_id="r-1", outcome=pb.OUTCOME_COMPLETED, model="m",
        usage=pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        timings=pb.Timings(submitted_unix_ns=5_000_000_000),
        **fields,
    )  # fmt: skip


def choice() -> pb.Choice:
    return pb.Choice(
        text="t1t2",
        token_ids=[1, 2],
        finish_reason=pb.FINISH_REASON_STOP,
        stop_string="x",
        logprobs=[entry(1, -0.5, (7, -1.0), (8, -3.0)), entry(2, float("-inf"), (9, -0.25))],
    )


def body(url: str, **fields: Any) -> Any:
    prompt: dict[str, Any] = (
        {"prompt": "p"} if url == COMPLETIONS_URL else {"messages": [{"role": "user", "content": "hi"}]}
    )
    return parse_body(url, {**prompt, **fields})


def made(url: str, outcome: pb.Result, **fields: Any) -> dict[str, Any]:
    line = answer("c", 4, body(url, **fields), outcome)
    assert line["custom_id"] == "c"
    assert line["error"] is None
    response: dict[str, Any] = line["response"]["body"]
    return response


def test_a_completion() -> None:
    response = made(COMPLETIONS_URL, result(choices=[choice()]), logprobs=1)
    first = response["choices"][0]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("t1t2", "stop", "x")
    assert first["logprobs"] == {
        "text_offset": [0, 2],
        "token_logprobs": [-0.5, -9999.0],
        "tokens": ["t1", "t2"],
        "top_logprobs": [{"t1": -0.5, "t7": -1.0}, {"t2": -9999.0, "t9": -0.25}],
    }
    assert response["usage"] == {
        "prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": None,
    }  # fmt: skip
    assert response["created"] == 5


def test_an_echo_has_the_prompts_log_probabilities() -> None:
    prompt = [pb.TokenLogprob(token_id=5, token="t5"), entry(6, -2.0)]
    ended = result(choices=[choice()], prompt_logprobs=prompt)
    echoed = made(COMPLETIONS_URL, ended, logprobs=0, echo=True)["choices"][0]
    assert echoed["logprobs"]["tokens"] == ["t5", "t6", "t1", "t2"]
    assert echoed["logprobs"]["token_logprobs"] == [None, -2.0, -0.5, -9999.0]
    assert echoed["logprobs"]["top_logprobs"][:2] == [None, {"t6": -2.0}]
    assert echoed["prompt_logprobs"] == [None, {"6": {"logprob": -2.0, "rank": 1, "decoded_token": "t6"}}]


def test_a_chat() -> None:
    ended = result(choices=[choice(), pb.Choice(index=1, text="z", stop_token_id=0)])
    response = made(CHAT_URL, ended, logprobs=True, top_logprobs=2, n=2, return_tokens_as_token_ids=True)
    first, second = response["choices"]
    assert (first["message"]["role"], first["message"]["content"]) == ("assistant", "t1t2")
    assert second["stop_reason"] == 0
    content = first["logprobs"]["content"]
    assert [c["token"] for c in content] == ["token_id:1", "token_id:2"]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["token_id:1", "token_id:7"]
    assert content[0]["bytes"] == list(b"t1")


def test_a_chat_that_goes_on_keeps_the_role() -> None:
    ended = result(choices=[choice()])
    response = made(CHAT_URL, ended, add_generation_prompt=False, continue_final_message=True)
    assert response["choices"][0]["message"]["role"] == "user"
    assert response["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [
        (pb.OUTCOME_REJECTED, "", 400),
        (pb.OUTCOME_REJECTED, "model_not_found", 404),
        (pb.OUTCOME_CANCELLED, "", 499),
        (pb.OUTCOME_EXPIRED, "", 408),
        (pb.OUTCOME_DEAD, "", 500),
    ],
)
def test_a_failure_says_so_twice(outcome: pb.Outcome.ValueType, code: str, status: int) -> None:
    error = pb.RequestError(code=code, message="why", param="sampling.p")
    ended = pb.Result(request_id="r", outcome=outcome, error=error)
    line = answer("c", 4, body(CHAT_URL), ended)
    assert line["response"]["status_code"] == status
    inner = line["response"]["body"]["error"]
    assert (inner["message"], inner["param"]) == ("why", "p"), "as the server answers the body"
    assert (line["error"]["line"], line["error"]["param"]) == (4, "body.p"), "as the fields of a line are named"
    assert line["error"]["code"]


def test_a_failure_that_names_no_field_has_none() -> None:
    ended = pb.Result(request_id="r", outcome=pb.OUTCOME_DEAD)
    assert answer("c", 4, body(CHAT_URL), ended)["error"]["param"] is None


def test_a_line_that_was_never_asked() -> None:
    assert error_line("b-2", None, 2, "invalid_json_line", "why", "") == {
        "id": "vllm-b-2", "custom_id": None, "response": None,
        "error": {"code": "invalid_json_line", "message": "why", "param": None, "line": 2},
    }  # fmt: skip


def test_vllms_own_models_accept_every_answer() -> None:
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    ended = result(choices=[choice()])
    for kind, response in (
        (chat.ChatCompletionResponse, made(CHAT_URL, ended, logprobs=True, top_logprobs=1)),
        (completion.CompletionResponse, made(COMPLETIONS_URL, ended, logprobs=1)),
    ):
        parsed = kind.model_validate(response)
        assert not parsed.model_extra, "no field that vLLM does not have"
        assert not parsed.choices[0].model_extra
        assert parsed.usage.total_tokens == 5
