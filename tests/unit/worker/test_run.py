"""Results and deltas made of what a run generated."""

from __future__ import annotations

import pytest

from penstock.limits import MAX_REQUEST_BYTES
from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from services.worker import run as run_module
from services.worker.core.messages import Credits, Ending, EndingKind, Lease
from services.worker.engine import ChoiceStep, EngineStep, TokenProbability
from services.worker.logprobs import least_prompt_logprobs
from services.worker.run import Run

LEASE = Lease("r1", 2, 9)
DONE = Ending(EndingKind.COMPLETED)
SPENT = Credits(granted_ns=5, booked_blocks=9, settled_blocks=3, released_blocks=4, tokenizer_acks=2)


def made(**fields: object) -> Run:
    request = pb.Request(
        request_id="r1", batch="b", channel="batch", client_reference="line 4", idempotency_key="k", text="prompt"
    )
    run = Run(LEASE, LEASE.run_id, request, 1, 2)
    run.prompt_ids = [1, 2, 3]
    for name, value in fields.items():
        setattr(run, name, value)
    return run


def sent(message: bytes) -> q.Complete:
    return q.WorkerToQueue.FromString(message).complete


def step(*choices: ChoiceStep, finished: bool = False) -> EngineStep:
    return EngineStep(choices, finished, cached_tokens=2, preemptions=1)


def test_a_result_has_everything_generated() -> None:
    run = made()
    run.output.take(step(ChoiceStep(1, (5,), "five"), ChoiceStep(0, (7, 8), "seven")))
    run.output.take(step(ChoiceStep(1, (6,), " six", finish_reason="stop", stop_reason="END")))
    run.output.take(step(ChoiceStep(0, (9,), "", finish_reason="stop", stop_reason=9), finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert (result.outcome, result.model) == (1, "tiny")
    assert [(c.index, c.text, list(c.token_ids)) for c in result.choices] == [
        (0, "seven", [7, 8, 9]),
        (1, "five six", [5, 6]),
    ]
    assert (result.choices[0].stop_token_id, result.choices[1].stop_string) == (9, "END")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (3, 5, 2)
    assert result.preemptions == 1
    assert result.credits == pb.Credits(
        granted_unix_ns=5, booked_blocks=9, settled_blocks=3, released_blocks=4, tokenizer_acks=2
    )


CHAT = pb.ChatPrompt(messages_json="[]")
TOOLS = pb.ChatPrompt(messages_json="[]", tools=pb.ToolUse(tools_json="[{}]"))
WANTED = pb.ChatPrompt(messages_json="[]", as_message=pb.AsMessage())
IN_PARTS = pb.ChatPrompt(messages_json="[]", as_message=pb.AsMessage(in_parts=True))


@pytest.mark.parametrize(
    ("chat", "tells_reasoning", "is_read", "every_step"),
    [
        (CHAT, True, False, False),
        (WANTED, False, False, False),
        (IN_PARTS, False, False, False),
        (WANTED, True, True, False),
        (IN_PARTS, True, True, True),
        (TOOLS, False, True, False),
        (TOOLS, True, True, False),
        (None, True, False, False),
    ],
)
def test_an_answer_is_read_as_a_message_where_it_is_wanted_and_can_be(
    chat: pb.ChatPrompt | None, tells_reasoning: bool, is_read: bool, every_step: bool
) -> None:
    request = pb.Request(text="prompt") if chat is None else pb.Request(chat=chat)
    run = Run(LEASE, LEASE.run_id, request, 1, 2, tells_reasoning)
    run.tell_at_tokens = 40
    asked = run.for_engine(64, guaranteed=False)
    assert asked.chat == (chat if is_read else None)
    assert asked.tell_at_tokens == (1 if every_step else 40)
    run.output.take(step(ChoiceStep(0, (7,), "seven")))
    ((delta, _),) = run.output.deltas("r1", 2)
    assert delta.as_message == is_read, "who shows it must know whether to show the text"


def test_reasoning_is_counted_over_all_completions_if_it_is_counted() -> None:
    run = made()
    message = pb.ToolMessage(content="Seven.", reasoning="Hm.")
    ends = [ChoiceStep(at, (5,), "x", finish_reason="stop", message=message, reasoning_tokens=2 + at) for at in (0, 1)]
    run.output.take(step(*ends, finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert [choice.message for choice in result.choices] == [message, message]
    assert result.usage.reasoning_tokens == 5
    run = made()
    run.output.take(step(ChoiceStep(0, (5,), "x", finish_reason="stop"), finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert not result.usage.HasField("reasoning_tokens")
    assert not result.choices[0].HasField("message")


def test_a_result_has_its_times() -> None:
    times = {"engine_started_ns": 3, "first_token_ns": 1_700_000_000_123_456_789, "last_token_ns": 2**63 - 1}
    result = sent(made(**times).finish(DONE, "tiny", SPENT)).result
    assert result.timings == pb.Timings(
        delivered_unix_ns=2,
        engine_started_unix_ns=3,
        first_token_unix_ns=1_700_000_000_123_456_789,
        last_token_unix_ns=2**63 - 1,
    )


def test_what_a_completion_is_made_of_is_not_kept_beside_it() -> None:
    run = made()
    run.output.take(step(ChoiceStep(0, (7,), "seven"), finished=True))
    assert sent(run.finish(DONE, "tiny", SPENT)).result.choices
    assert run.output.choices == {}
    assert not run.prompt_ids
    assert not run.request.HasField("text")


def test_a_failure_carries_no_result() -> None:
    complete = sent(made().finish(Ending(EndingKind.FAILED, "engine_error", "why"), "tiny", SPENT))
    assert complete.WhichOneof("ending") == "failure"
    assert (complete.failure.code, complete.failure.message) == ("engine_error", "why")


def test_a_cancelled_run_tells_what_it_cost() -> None:
    run = made()
    run.output.take(step(ChoiceStep(0, (7, 8), "seven")))
    result = sent(run.finish(Ending(EndingKind.CANCELLED, "cancelled", "why"), "tiny", SPENT)).result
    assert (result.usage.completion_tokens, result.usage.cached_tokens, result.preemptions) == (2, 2, 1)
    assert not result.choices


def test_a_rejection_names_the_field() -> None:
    ending = Ending(EndingKind.REJECTED, "invalid_parameter", "too hot", "sampling.temperature")
    result = sent(made().finish(ending, "tiny", SPENT)).result
    assert result.outcome == pb.OUTCOME_REJECTED
    assert (result.error.code, result.error.param) == ("invalid_parameter", "sampling.temperature")


@pytest.mark.parametrize("kind", [EndingKind.FAILED, EndingKind.REJECTED])
def test_an_error_that_quotes_what_utf8_cannot_say_is_told_all_the_same(kind: EndingKind) -> None:
    complete = sent(made().finish(Ending(kind, "invalid_prompt", 'no "\ud800" here', "tools.\udfff"), "tiny", SPENT))
    error = complete.failure if kind is EndingKind.FAILED else complete.result.error
    assert (error.message, error.param) == ('no "\\ud800" here', "tools.\\udfff")


def test_an_error_quotes_only_so_much() -> None:
    ending = Ending(EndingKind.REJECTED, "invalid_prompt", "\ud800" * 10**6, "x" * 10**6)
    error = sent(made().finish(ending, "tiny", SPENT)).result.error
    assert error.message.startswith("\\ud800")
    assert error.ByteSize() < 100_000


def test_a_result_no_frame_can_carry_is_rejected_and_not_sent_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_REQUEST_BYTES", 2000)
    run = made()
    run.output.take(step(ChoiceStep(0, (1,), "x" * 5000, finish_reason="length"), finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert (result.outcome, result.error.code) == (pb.OUTCOME_REJECTED, "result_too_large")
    assert "2000" in result.error.message


@pytest.mark.parametrize(
    ("asked", "of_prompt", "of_output", "field"),
    [
        ({"prompt_logprobs": 1, "logprobs": 1}, 9, 2, "sampling.prompt_logprobs"),
        ({"prompt_logprobs": 1, "logprobs": 1}, 2, 9, "sampling.logprobs"),
        ({"logprobs": 1}, 9, 2, "echo"),
        ({"prompt_logprobs": 1}, 9, 0, "sampling.prompt_logprobs"),
        ({}, 0, 0, "sampling.max_tokens"),
    ],
)
def test_a_result_that_is_too_large_names_the_field_that_made_it_so(
    asked: dict[str, int], of_prompt: int, of_output: int, field: str
) -> None:
    run = made(sampling=pb.SamplingParams(**asked))  # type: ignore[arg-type]
    entry = TokenProbability(1, "a", -1.0, 1, (TokenProbability(1, "a", -1.0, 1),))
    text = "x" * (MAX_REQUEST_BYTES + 1)
    run.output.take(EngineStep([], False, prompt_logprobs=[entry] * of_prompt))
    run.output.take(step(ChoiceStep(0, (1,), text, [entry] * of_output, finish_reason="length"), finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert (result.error.code, result.error.param) == ("result_too_large", field)


@pytest.mark.parametrize("top", [0, 1, 2, 20, 300])
@pytest.mark.parametrize("certain", [True, False])
def test_no_prompts_log_probabilities_take_less_than_is_said(top: int, certain: bool) -> None:
    likeliest = tuple(
        TokenProbability(at, "", 0.0 if certain and not at else -float("inf"), at + 1) for at in range(top)
    )
    entry = TokenProbability(0, "", 0.0 if certain else -1.0, 1, likeliest)
    run = made()
    run.output.take(EngineStep([], False, prompt_logprobs=[TokenProbability(0, "", 0.0, 0), *[entry] * 99]))
    least = least_prompt_logprobs(100, top)
    assert least <= len(b"".join(run.output.fill(pb.Result(), None)))
    assert least or top < 2


def test_an_echoed_prompt_stands_beside_the_choices() -> None:
    run = made(prompt_text="prompt")
    run.output.take(step(ChoiceStep(0, (1,), " and on", finish_reason="length"), finished=True))
    result = sent(run.finish(DONE, "tiny", SPENT)).result
    assert (result.prompt_text, result.choices[0].text) == ("prompt", " and on")


def told(run: Run) -> list[q.WorkerToQueue]:
    return [q.WorkerToQueue.FromString(message) for message in run.token_messages()]


def test_deltas_join_without_gaps_and_begin_again_for_a_new_watcher() -> None:
    run = made()
    run.output.take(
        step(ChoiceStep(0, (1, 2), "ab", [TokenProbability(1, "a", -1.0, 1), TokenProbability(2, "b", -2.0, 1)]))
    )
    (first,) = told(run)
    assert (first.tokens.offset, list(first.tokens.token_ids), first.tokens.text) == (0, [1, 2], "ab")
    assert len(first.tokens.logprobs) == 2
    assert told(run) == []
    run.output.take(step(ChoiceStep(0, (3,), "c")))
    (second,) = told(run)
    assert (second.tokens.offset, second.tokens.text, second.tokens.attempt) == (2, "c", 2)
    run.output.untell()
    (again,) = told(run)
    assert (again.tokens.offset, again.tokens.text) == (0, "abc")
