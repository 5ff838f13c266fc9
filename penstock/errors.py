"""What the client raises."""

from __future__ import annotations

import re

import grpc


class PenstockError(Exception):
    """Base of everything the client raises on purpose."""


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


class ServiceError(PenstockError):
    """The service failed in a way that is not the caller's fault and that retrying did not cure."""


_FIELD = re.compile(r"^([A-Za-z_][\w.\[\]]*): ")


def from_rpc(error: grpc.aio.AioRpcError, address: str) -> PenstockError:
    """Return the client's error for a failed call to the service at `address`."""
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            field = _FIELD.match(details)
            return InvalidRequest(details, field.group(1) if field else "")
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(details)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"nothing answers on {address} ({details})")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unavailable(details)
        case code:
            return ServiceError(f"{address} answered {code.name}: {details}")
