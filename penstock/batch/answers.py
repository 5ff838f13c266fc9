"""Turns a result into an output line, shaped as `vllm run-batch` writes it."""

from __future__ import annotations

from typing import Any

from penstock.openai.answers import body_of, failure_of
from penstock.openai.bodies import ChatBody, CompletionBody
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

Line = dict[str, Any]


def answer(custom_id: str, line: int, body: ChatBody | CompletionBody, result: pb.Result) -> Line:
    """Return the output line for a request that has ended, however it ended."""
    name = result.request_id
    if result.outcome == pb.OUTCOME_COMPLETED:
        response = _response(name, 200, body_of(Shape.of(body), result))
        return {"id": f"vllm-{name}", "custom_id": custom_id, "response": response, "error": None}
    status, inner = failure_of(result, Shape.of(body))
    # Beside the number of the line a field is named as the line has it; in the response, as the body has it.
    param = inner["param"] and f"body.{inner['param']}"
    error = {"code": inner["code"], "message": inner["message"], "param": param, "line": line}
    response = _response(name, status, {"error": inner})
    return {"id": f"vllm-{name}", "custom_id": custom_id, "response": response, "error": error}


def _response(name: str, status: int, body: Line) -> Line:
    return {"status_code": status, "request_id": f"vllm-batch-{name}", "body": body}


def error_line(name: str, custom_id: str | None, line: int, code: str, message: str, param: str) -> Line:
    """Return the output line for input line `line` that never became a request."""
    return {
        "id": f"vllm-{name}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message, "param": param or None, "line": line},
    }
