"""What is said of an engine that is being started: vLLM waits for its core without a word and without a bound."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAY_S = 60.0
"""Between two lines. Large models load for minutes, which is no fault: only who reads the log can tell."""

log = logging.getLogger("worker")


@contextmanager
def telling_of_start(every_s: float = SAY_S) -> Iterator[None]:
    """Log every so many seconds for how long the engine has been starting; from a thread, for vLLM has this one."""
    over, began_s = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every_s):
            log.info("the engine has been starting for %.0f s", time.monotonic() - began_s)

    teller = threading.Thread(target=tell, name="engine-start", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
