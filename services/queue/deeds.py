"""What the log says of calls that end, revive or copy what others may look for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.queue.v1 import queue_pb2
from services.auth.caller import CALLER
from services.auth.deeds import note
from services.logs import about
from services.quoting import shown

log = logging.getLogger(__name__)

Request = queue_pb2.CancelRequest | queue_pb2.DeleteRequest | queue_pb2.RequeueDeadRequest


def cancelled(request: queue_pb2.CancelRequest, done: queue_pb2.CancelResponse) -> None:
    """Note a cancel: it is anybody's, and what a gateway does for each client that leaves.

    Where nobody can be told from a client that of a whole batch is noted all the same.
    """
    subject, extra = _subject(request)
    text = "cancelled %s: %d ended, %d told to stop, %d not to be cancelled"
    values = (subject, done.cancelled, done.aborting, len(done.not_cancelled))
    keyless = CALLER.get().role is None
    note(log, text, *values, anybodys=not (request.batch and keyless), extra=extra)


@contextmanager
def until_cut_short(request: Request) -> Iterator[None]:
    """Note a call that its caller leaves before it is over: what was done by then stays done."""
    try:
        yield
    except asyncio.CancelledError:
        subject, extra = _subject(request)
        kind = type(request).__name__.removesuffix("Request")
        keyless = CALLER.get().role is None
        text = "%s of %s: its caller left before it was over, and a part of it may be done"
        note(log, text, kind, subject, anybodys=not keyless, extra=extra)
        raise


def deleted(request: queue_pb2.DeleteRequest, done: queue_pb2.DeleteResponse) -> None:
    """Note a delete of results: whoever has read its own may delete them."""
    subject, extra = _subject(request)
    note(log, "deleted the results of %s: %d", subject, done.deleted, anybodys=True, extra=extra)


def requeued(request: queue_pb2.RequeueDeadRequest, done: queue_pb2.RequeueDeadResponse) -> None:
    """Note dead letters that were put back in line."""
    subject, extra = _subject(request)
    note(log, "requeued %s: %d are back in line, %d were none", subject, done.requeued, len(done.not_dead), extra=extra)


def backed_up(done: queue_pb2.BackupResponse) -> None:
    """Note a backup."""
    note(log, "made a backup at %s: %d requests wait in it, %d have results", done.path, done.waiting, done.results)


def _subject(request: Request) -> tuple[str, dict[str, str] | None]:
    if isinstance(request, queue_pb2.RequeueDeadRequest):
        if request.all:
            return "all dead letters", None
    elif request.batch:
        return f"batch {shown(request.batch)}", None
    return _named(request.request_ids.ids)


def _named(names: Sequence[str]) -> tuple[str, dict[str, str] | None]:
    """Return what is said of requests that were named: of one its name, in the field that a search looks in too."""
    if len(names) > 1:
        return f"{len(names)} requests by name", None
    (name,) = names
    return f"request {shown(name)}", about(name) if name.isascii() and name.isprintable() else None
