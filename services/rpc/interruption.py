"""Ending what a task does, from outside, with an error that says why."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Interruption:
    """To have as a context: another task may end its body at any time.

    A cancellation of somebody else's at the same time stays one.
    """

    def __init__(self) -> None:
        """Belong to the present task."""
        task = asyncio.current_task()
        assert task is not None, "what is ended is a task's"
        self._task = task
        self._cancelled_before = task.cancelling()
        self._error: Exception | None = None
        self._is_over = False

    def end(self, error: Exception) -> bool:
        """Have the body end with `error`; return False, and do nothing, if it has ended or is to end already."""
        if self._is_over or self._error is not None:
            return False
        self._error = error
        self._task.cancel()
        return True

    def __enter__(self) -> Self:
        """Begin the body."""
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None) -> None:
        """Raise what the body was to end with, if that is why it ended."""
        self._is_over = True
        if self._error is None:
            return
        is_cancelled_besides = self._task.uncancel() > self._cancelled_before
        if kind is asyncio.CancelledError and not is_cancelled_besides:
            raise self._error from None
