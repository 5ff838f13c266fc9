"""A read that fails is told in one way everywhere: logged, counted, and answered with the code that says what helps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from services.queue.storage.store import StoreDamagedError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the code of a StoreError, or of a refusal whose cause, if it has one, is what a read raised.

    DATA_LOSS if what is read is damaged, and INTERNAL if a read failed in a way that nobody foresaw, so that nobody
    tries for ever; else UNAVAILABLE.
    """
    raised = error if isinstance(error, StoreError) else error.__cause__
    if isinstance(raised, StoreDamagedError):
        return grpc.StatusCode.DATA_LOSS
    return grpc.StatusCode.UNAVAILABLE if raised is None or isinstance(raised, StoreError) else grpc.StatusCode.INTERNAL


def decoded(decode: Callable[[bytes], T], row: bytes) -> T:
    """Return what a row says; raises StoreDamagedError if `decode` raises ValueError: it is none of such rows."""
    try:
        return decode(row)
    except ValueError as error:
        raise StoreDamagedError(f"a row cannot be decoded: {error}") from error


class ReadFaults:
    """Notes reads of the store that fail."""

    def __init__(self, count: Callable[[], None] = lambda: None) -> None:
        """Call `count` for each."""
        self._count = count

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Log and count a StoreError, and let it pass."""
        try:
            yield
        except StoreError as error:
            self.note(error)
            raise

    def note(self, error: StoreError) -> None:
        """Log and count a read that failed."""
        log.error("the store cannot be read: %s", error)
        self._count()
