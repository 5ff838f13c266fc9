"""What a client is told of requests that ended without an answer, and of lists it asks for wrongly."""

from __future__ import annotations

import pytest

from penstock.errors import PermissionDenied, Unavailable
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.files import read_after
from services.gateway.problem import Problem, of_error, of_result
from services.gateway.requests import described


@pytest.mark.parametrize(
    ("outcome", "said", "code", "status"),
    [
        (pb.OUTCOME_CANCELLED, "cancelled", "request_cancelled", 499),
        (pb.OUTCOME_CANCELLED, "", "request_cancelled", 499),
        (pb.OUTCOME_EXPIRED, "deadline_exceeded", "deadline_exceeded", 408),
        (pb.OUTCOME_REJECTED, "pool_too_small", "pool_too_small", 400),
        (pb.OUTCOME_DEAD, "", "attempts_exhausted", 500),
    ],
)
def test_codes_are_those_of_the_documents(outcome: pb.Outcome.ValueType, said: str, code: str, status: int) -> None:
    problem = of_result(pb.Result(outcome=outcome, error=pb.RequestError(code=said)))
    assert (problem.error["code"], problem.status) == (code, status)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.logprobs", "logprobs"),
        ("sampling", None),
        ("prompt", "prompt"),
        ("channel", "x-penstock-channel"),
        ("", None),
    ],
)
def test_a_field_has_the_name_a_body_gives_it(field: str, param: str | None) -> None:
    result = pb.Result(outcome=pb.OUTCOME_REJECTED, error=pb.RequestError(code="invalid_parameter", param=field))
    assert of_result(result).error["param"] == param


def test_a_request_is_shown_with_the_error_that_its_asker_got() -> None:
    error = pb.RequestError(code="deadline_exceeded", message="too late", param="deadline_unix_ns")
    result = pb.Result(outcome=pb.OUTCOME_EXPIRED, error=error)
    shown = described("r-0", [queue_pb2.GetResponse(request_id="r-0", result=result)])["response"]
    asked = of_result(result)
    assert shown == {"status_code": asked.status, "body": asked.body}
    assert asked.error["param"] == "x-penstock-deadline-ms"


def test_a_call_that_is_refused_for_a_field_names_its_header() -> None:
    problem = of_error(PermissionDenied("requests[0].channel: 'vip' is not for this key; it may use: batch"))
    text = "x-penstock-channel: 'vip' is not for this key; it may use: batch"
    assert (problem.status, problem.error["param"], problem.error["message"]) == (403, "x-penstock-channel", text)
    problem = of_error(Unavailable("no connection"))
    text = "the queue does not take this now: no connection"
    assert (problem.error["param"], problem.error["message"]) == (None, text)


def test_a_list_is_not_begun_again_after_what_is_no_id() -> None:
    assert read_after({}, "file-") == ""
    assert read_after({"after": "file-18ea"}, "file-") == "file-18ea"
    with pytest.raises(Problem) as refused:
        read_after({"after": "batch_18ea"}, "file-")
    assert (refused.value.status, refused.value.error["param"]) == (400, "after")
