"""Names that a call carries: of requests, batches, tenants and keys. A wrong one is refused before it is sent."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidRequest
from penstock.limits import MAX_NAME_BYTES

BATCH_CHANNEL = "batch"
"""Channel of batches for which nobody has named one, where the queue has it."""


def check_name(field: str, name: object) -> None:
    """Raise InvalidRequest, naming `field`, for what is no name: protobuf would raise a TypeError of its own."""
    if not isinstance(name, str):
        raise InvalidRequest(f"{field}: is no text but {type(name).__name__}", field, "invalid_type")
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field}: is no UTF-8 ({error.reason})", field) from None
    if size_bytes > MAX_NAME_BYTES:
        raise InvalidRequest(f"{field}: {size_bytes} bytes; at most {MAX_NAME_BYTES} are allowed", field)


def checked_names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return several names. Raises InvalidRequest for one that is none, and for a single name where several go."""
    if isinstance(names, str | bytes):
        raise InvalidRequest(f"{field}: is one name; give a list of them", field, "invalid_type")
    try:
        several = tuple(names)
    except TypeError:
        raise InvalidRequest(f"{field}: is no list but {type(names).__name__}", field, "invalid_type") from None
    for position, name in enumerate(several):
        check_name(f"{field}[{position}]", name)
    return several
