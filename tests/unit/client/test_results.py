"""What the wire says of an answer: one that a worker read as a message, one that a newer queue has ended."""

from __future__ import annotations

from penstock import FinishReason, Outcome, Result
from penstock.request.v1 import request_pb2 as pb
from penstock.results import result_from

RAW = "<think>Hm.</think>Seven."


def answered(message: pb.ToolMessage | None, **usage: int) -> Result:
    choice = pb.Choice(text=RAW, message=message)
    return result_from(pb.Result(outcome=pb.OUTCOME_COMPLETED, choices=[choice], usage=pb.Usage(**usage)))


def test_what_was_thought_is_told_apart_and_the_text_stays() -> None:
    result = answered(pb.ToolMessage(content="Seven.", reasoning="Hm."), completion_tokens=9, reasoning_tokens=3)
    assert (result.text, result.reasoning, result.choices[0].content) == (RAW, "Hm.", "Seven.")
    assert (result.usage.completion_tokens, result.usage.reasoning_tokens) == (9, 3)


def test_nothing_thought_is_something_else_than_nothing_said() -> None:
    result = answered(pb.ToolMessage(reasoning=""), reasoning_tokens=0)
    assert (result.reasoning, result.choices[0].content, result.usage.reasoning_tokens) == ("", None, 0)


def test_where_no_parser_read_it_there_is_the_text_alone() -> None:
    result = answered(None)
    assert (result.text, result.reasoning, result.choices[0].content) == (RAW, None, None)
    assert result.usage.reasoning_tokens is None
    assert Result("r-1", Outcome.DEAD).reasoning is None


def test_a_reason_that_only_a_newer_queue_knows_keeps_no_answer_from_its_reader() -> None:
    choice = pb.Choice(text="Seven.", finish_reason=max(pb.FinishReason.values()) + 1)  # type: ignore[arg-type]
    result = result_from(pb.Result(outcome=pb.OUTCOME_COMPLETED, choices=[choice]))
    assert (result.text, result.choices[0].finish_reason) == ("Seven.", FinishReason.UNSPECIFIED)
