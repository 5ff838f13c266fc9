"""What calls are about: named requests, in as many calls as they take, or all that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from penstock.errors import InvalidRequest, PenstockError
from penstock.limits import MAX_CURSOR
from penstock.names import check_name, checked_names
from penstock.queue.v1 import queue_pb2 as pb

MAX_NAMES = 10_000
"""Names in one call; the queue refuses more."""

OfBatch = TypeVar("OfBatch", pb.CancelRequest, pb.DeleteRequest)


def check_one_subject(field: str, given: bool, request_ids: object) -> None:
    """Raise InvalidRequest if requests are named beside what stands for more than them.

    Who means "these, of that batch" would have all of it deleted.
    """
    if given and request_ids:
        raise InvalidRequest(f"request_ids: given beside {field}, which means all of it; give only one", "request_ids")


def check_one_name(request_id: str | None, idempotency_key: str) -> None:
    """Raise InvalidRequest where a request is named twice over: the names may be those of two."""
    if request_id is not None and idempotency_key:
        raise InvalidRequest("idempotency_key: given beside request_id; give only one", "idempotency_key")


def check_cursor(cursor: object) -> None:
    """Raise InvalidRequest for what is no cursor."""
    if not (isinstance(cursor, int) and 0 <= cursor <= MAX_CURSOR):
        raise InvalidRequest(f"cursor: must be a whole number from 0 to {MAX_CURSOR}, not {cursor!r}", "cursor")


def names_to_watch(batch: str | None, request_ids: Sequence[str], cursor: object) -> Sequence[str]:
    """Return the names of the requests to watch, none of a batch. Raises PenstockError for what cannot be watched."""
    check_one_subject("batch", batch is not None, request_ids)
    if batch is not None:
        check_name("batch", batch)
    elif not request_ids:
        raise PenstockError("nothing to watch: give a batch or request ids")
    check_cursor(cursor)
    return checked_names("request_ids", request_ids)


def of_batch(kind: Callable[[], OfBatch], request_ids: Sequence[str], batch: str | None) -> Iterator[OfBatch]:
    """Yield the calls that are about a batch or, without one, the named requests. Raises InvalidRequest for no name."""
    check_one_subject("batch", batch is not None, request_ids)
    if batch is None:
        for names in _pieces(request_ids):
            request = kind()
            request.request_ids.ids.extend(names)
            yield request
        return
    check_name("batch", batch)
    request = kind()
    request.batch = batch
    yield request


def of_dead(request_ids: Sequence[str], all_dead: bool) -> Iterator[pb.RequeueDeadRequest]:
    """Yield the calls that are about all dead letters, or the named ones. Raises InvalidRequest for what is no name."""
    check_one_subject("all_dead", all_dead, request_ids)
    if all_dead:
        yield pb.RequeueDeadRequest(all=True)
        return
    for names in _pieces(request_ids):
        yield pb.RequeueDeadRequest(request_ids=pb.RequestIds(ids=names))


def _pieces(request_ids: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the names, as many as one call takes; one call of none, which the queue refuses.

    Each once: named in two calls, a dead letter that dies again in between would be requeued twice.
    """
    names = tuple(dict.fromkeys(checked_names("request_ids", request_ids)))
    for start in range(0, max(len(names), 1), MAX_NAMES):
        yield names[start : start + MAX_NAMES]
