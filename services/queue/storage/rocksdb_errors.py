"""What the binding raises, as the queue says it."""

from __future__ import annotations

from typing import Final

import rocksdict

from services.queue.storage.opening import DAMAGE
from services.queue.storage.store import StoreDamagedError, StoreError

BORROWED: Final = "Already mutably borrowed"
"""What the binding says of a database that another thread is closing."""


class StoreErrors:
    """Turns what rocksdict raises into a StoreError. A class, because every request's rows pass here: a generator that
    is a context manager costs more than a look-up."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the StoreError that `error` is about."""
        if not isinstance(error, Exception) or isinstance(error, StoreError):
            return
        text = str(error) or type(error).__name__  # rocksdict raises plain Exception for nearly every failure
        if isinstance(error, (KeyError, rocksdict.DbClosedError)) or text == BORROWED:
            raise StoreError("the store is closed; it is being opened again") from error
        raise (StoreDamagedError if text.startswith(DAMAGE) else StoreError)(text) from error


STORE_ERRORS: Final = StoreErrors()
"""It has no state."""
