"""A read that fails is told in one way everywhere: logged, counted, and answered with the code that says what helps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from services.queue.store import StoreDamagedError, StoreError

log = logging.getLogger(__name__)


def code_of(error: Exception) -> grpc.StatusCode:
    """Return DATA_LOSS if what is read is damaged, so that nobody tries for ever; else UNAVAILABLE."""
    damaged = isinstance(error, StoreDamagedError) or isinstance(error.__cause__, StoreDamagedError)
    return grpc.StatusCode.DATA_LOSS if damaged else grpc.StatusCode.UNAVAILABLE


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
