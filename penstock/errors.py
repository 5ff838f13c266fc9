"""What the client raises."""

from __future__ import annotations

import copy
import re
from typing import TypeVar

from penstock.loaded import grpc

E = TypeVar("E", bound=Exception)


class PenstockError(Exception):
    """Base of everything the client raises on purpose."""

    is_undone = False
    """Whether it is certain, and not merely unknown, that nothing came of what was asked for; only `submit` tells."""


class InvalidRequest(PenstockError):  # noqa: N818 - the name says what is wrong
    """The request can never be accepted as it is; `param` names the field, `code` the problem."""

    def __init__(self, message: str, param: str = "", code: str = "invalid_request") -> None:
        """Say what is wrong with which field."""
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(PenstockError):  # noqa: N818
    """The queue or the scheduler does not know the name."""


class Unavailable(PenstockError):  # noqa: N818
    """The service does not answer, or takes no submits now; the same call may succeed later."""


class NobodyAnswers(Unavailable):
    """No service was reached at all."""


class Unauthenticated(PenstockError):  # noqa: N818
    """The service wants an API key, and was given none or one that is not good (any more)."""


class QuotaExceeded(PenstockError):  # noqa: N818
    """So much of the tenant waits already that no more is taken; the text names the quota and its value."""


class PermissionDenied(PenstockError):  # noqa: N818
    """The API key is good, but not for this."""


class ServiceError(PenstockError):
    """The service failed in a way that is not the caller's fault and that retrying did not cure."""


class WrongService(ServiceError):  # noqa: N818
    """Who answers at the address does not know the call: it is another service, or an older one."""


class NotPossibleNow(ServiceError):  # noqa: N818
    """What is asked for cannot be done while things are as they are."""


_FIELD = re.compile(r"^([A-Za-z_][\w.\[\]]*): ")


_PLACE = re.compile(r"^requests\[\d+\]\.")
_MESSAGES = re.compile(r"^(?:sampling|chat)\.")
_NAMES = {
    "extra_args_json": "extra_args",
    "chat_template_kwargs_json": "chat_template_kwargs",
    "messages_json": "messages",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "text": "prompt",
}
"""Fields of the wire's request that the caller gave under another name."""


def given_name(path: str) -> str:
    """Return the name under which the caller gave the field at `path` of a submit on the wire."""
    name = _MESSAGES.sub("", _PLACE.sub("", path))
    return _NAMES.get(name, name)


def as_given(message: str, param: str) -> tuple[str, str]:
    """Return an error's message and param with the field's name as the caller gave it."""
    name = given_name(param)
    for path in (param, _PLACE.sub("", param)):
        if path and message.startswith(f"{path}: "):
            return name + message[len(path) :], name
    return message, name


ERROR_CODE = "penstock-error-code"
"""Trailing metadata of a failed call: which of several reasons for its status it was."""

OVER_QUOTA = "insufficient_quota"
"""The reason of a RESOURCE_EXHAUSTED that concerns one tenant alone."""

LARGER_THAN_QUOTA = "larger_than_quota"
"""Code of a request that takes more than its tenant's whole quota."""

DISK_FULL = "disk_full"
"""The reason of a RESOURCE_EXHAUSTED that concerns everybody: the queue's disk is nearly full."""

STORE_UNAVAILABLE = "store_unavailable"
"""The reason of an UNAVAILABLE of a queue that is there, and cannot write."""


ANSWERED = "penstock-answered"
"""Trailing metadata of every call that a service has taken, whatever its status. Without it, that may be what gRPC
makes of a service that is away."""


def _trailing(error: grpc.aio.AioRpcError, name: str) -> str:
    found = [value for key, value in error.trailing_metadata() or () if key == name]
    return str(found[0]) if found else ""


BROKE_WHILE_WRITING = "Internal error from Core"
"""What grpc.aio's `set_internal_error` puts in place of the status of a stream that ended while it was being written.
The service itself says INTERNAL only with other words."""


CHANNEL_DENIED = "permission_denied"
"""Code of a request that its key may not submit to its channel."""


def refusal_of(code: str, message: str, param: str) -> PenstockError:
    """Return the client's error for one request of a stream that was refused with an error of this code."""
    if code == OVER_QUOTA:
        return QuotaExceeded(message)
    if code == CHANNEL_DENIED:
        return PermissionDenied(message)
    return InvalidRequest(message, param, code)


_DENIALS: dict[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.FAILED_PRECONDITION: NotPossibleNow,
}
"""What needs no more than the words of the service."""


def from_rpc(error: grpc.aio.AioRpcError, address: str) -> PenstockError:
    """Return the client's error for a failed call to the service at `address`."""
    details = error.details() or error.code().name
    denied = _DENIALS.get(error.code())
    if denied is not None:
        return denied(details)
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE | grpc.StatusCode.ALREADY_EXISTS:
            field = _FIELD.match(details)
            message, param = as_given(details, field.group(1) if field else "")
            return InvalidRequest(message, param, _trailing(error, ERROR_CODE) or "invalid_request")
        case code if _torn_off(code, details):
            return Unavailable(f"{address} broke off the call")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(details) if _trailing(error, ANSWERED) else _unavailable(details, address)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return QuotaExceeded(details) if _trailing(error, ERROR_CODE) == OVER_QUOTA else Unavailable(details)
        case code:
            return _failure(code, details, address)


def _failure(code: grpc.StatusCode, details: str, address: str) -> ServiceError:
    if code is grpc.StatusCode.UNIMPLEMENTED:
        what = f"{address} is another service, or an older one: it does not know this call"
        return WrongService(f"{what}; are the addresses of queue and scheduler swapped?")
    return ServiceError(f"{address} answered {code.name}: {details}")


_NOT_SENT = ("failed to connect", "errors resolving", "DNS resolution failed")
"""How gRPC begins about a call for which it had no connection."""

_NO_CONNECTION = {
    "http1.x server": ("speaks HTTP/1.1, not gRPC", "is it the gateway's port?"),
    "Socket closed": (
        "closes connections at once",
        "does it ask for TLS, or a certificate, that this side does not have?",
    ),
    "WRONG_VERSION_NUMBER": ("does not answer in TLS", "does it serve in plain text?"),
    "unsupported certificate purpose": (
        "has a client's certificate, not a service's",
        "was it started with what `penstock certs` prints for clients?",
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "has a certificate that is not trusted here",
        "is it of another CA, or has it expired?",
    ),
    "Hostname Verification Check failed": ("has a certificate for other names", "is it asked by the name in there?"),
    "Tls handshake failed": ("does not come to terms about TLS", "does it have other certificates than this side?"),
}
"""What gRPC says last of a connection that somebody is there to refuse, or whom this side refuses: what that means, and
what to look at."""


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether it is certain that the service did nothing for the call: it was not reached, or had no room for it."""
    said = bool(_trailing(error, ANSWERED))
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return not said and (error.details() or "").startswith(_NOT_SENT)
    return said and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _unavailable(details: str, address: str) -> Unavailable:
    """Return what keeps a call from its service: that nobody is there, or that the two do not come together."""
    if details.startswith("failed to connect"):
        for said, (what, hint) in _NO_CONNECTION.items():
            if said in details:
                return Unavailable(f"{address} {what} ({details}; {hint})")
    return NobodyAnswers(f"nothing answers on {address} ({details})")


def _torn_off(code: grpc.StatusCode, details: str) -> bool:
    """Whether the call ended without the service having answered it.

    A server that stops cancels what is open. Our own cancellation is not meant: grpc.aio raises CancelledError for it.
    """
    return code is grpc.StatusCode.CANCELLED or (code is grpc.StatusCode.INTERNAL and details == BROKE_WHILE_WRITING)


def anew(error: E) -> E:
    """Return an exception like `error`, for one of several who raise it: one gathers the frames of all who do."""
    try:
        return copy.copy(error)
    except Exception:  # an exception of somebody else's may not be made of its own arguments
        return error
