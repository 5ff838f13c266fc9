"""What a client is told when it gets no answer: OpenAI's error body with its HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import (
    OVER_QUOTA,
    InvalidRequest,
    NotFound,
    NotPossibleNow,
    PenstockError,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from penstock.openai.answers import error_object, failure_of
from penstock.request.v1 import request_pb2
from services.gateway.limits import RETRY_AFTER_S


class Problem(Exception):  # noqa: N818 - it is not always an error of ours
    """Ends the handling of a request with an error body."""

    def __init__(
        self, status: int, message: str, param: str = "", code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with this HTTP status; `param` names the field, `code` the problem."""
        super().__init__(message)
        self.status = status
        self.error = error_object(status, message, param, code)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The response body."""
        return {"error": self.error}


NO_RETRY = {"x-should-retry": "false"}
"""Of answers that asking again would not change: the fleet would do the same, and be paid again."""

HEADERS = {
    "channel": "x-penstock-channel",
    "idempotency_key": "idempotency-key",
    "deadline_unix_ns": "x-penstock-deadline-ms",
}
"""Fields of the queue's request that clients give as headers."""


ONE_OF_MANY = re.compile(r"requests\[\d+\]\.(?P<field>\w+): ")
"""How the queue names the field for which it refuses a whole call; over HTTP a call is one body, with one channel."""


def given_as(field: str) -> str:
    """Return the name under which a client gave a field of the queue's request."""
    return HEADERS.get(field, field)


def _as_given(text: str) -> tuple[str, str]:
    """Return the header that a refusal of a call is about, empty if none, and the refusal under its name."""
    found = ONE_OF_MANY.match(text)
    if found is None:
        return "", text
    name = given_as(found["field"])
    return name, f"{name}: {text[found.end() :]}"


def of_result(result: request_pb2.Result) -> Problem:
    """Return what a client is told of a request that ended without an answer."""
    status, error = failure_of(result)
    return Problem(status, error["message"], given_as(error["param"] or ""), error["code"], NO_RETRY)


def of_error(error: PenstockError) -> Problem:
    """Return what a client is told of a failed call to the queue."""
    if isinstance(error, InvalidRequest):
        return Problem(400, str(error), error.param, error.code)
    param, text = _as_given(str(error))
    for kind, status, code, headers in ANSWERS:
        if isinstance(error, kind):
            away = "the queue does not take this now: " if status == 503 else ""
            return Problem(status, f"{away}{text}", param, code, headers)
    return Problem(500, str(error), "", "internal_error")


ANSWERS: tuple[tuple[type[PenstockError], int, str, Mapping[str, str]], ...] = (
    (NotFound, 404, "not_found", {}),
    (Unauthenticated, 401, "invalid_api_key", {"www-authenticate": "Bearer"}),
    (PermissionDenied, 403, "permission_denied", {}),
    (NotPossibleNow, 409, "not_possible_now", {}),
    (QuotaExceeded, 429, OVER_QUOTA, {}),
    (Unavailable, 503, "queue_unavailable", {"retry-after": str(RETRY_AFTER_S)}),
)
"""Status, code and headers for each of the client's errors."""
