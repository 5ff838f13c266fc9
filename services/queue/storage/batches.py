"""One batch into RocksDB, which is let wait for nothing meanwhile.

The binding keeps the interpreter's lock while it writes. And a write that waits while a flush meets the end of the disk
waits for ever, whatever room is made: what is to end that state waits for the write. So where RocksDB would wait the
write is refused, and made again a little later, without the lock until then; if the flush fails, the error says why.
Who cannot wait at all, as an event loop, makes one try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import rocksdict

from services.queue.core.effects import Write

STALLED: Final = "Write stall"
"""In the error of a write that would have had to wait: for a flush, or for compactions."""

STALL_S = 60.0
"""Of waiting at most: a flush of 32 MiB that takes longer is no good news either."""

FIRST_PAUSE_S: Final = 0.001
MOST_PAUSE_S: Final = 0.032
"""Between two tries, doubled each time: every one copies what is to be written."""


def write_options() -> Any:
    """Return the options of a write that fails where RocksDB would wait."""
    options = rocksdict.WriteOptions()
    options.no_slowdown = True
    return options


def write_batch(
    db: Any,
    handles: Mapping[str, Any],
    writes: Sequence[Write],
    options: Any,
    stalled: Callable[[], None] = lambda: None,
    waits: bool = True,
) -> bool:
    """Write all of `writes` in one batch, unsynced, to the families of `handles`, with `options` as above.

    Call `stalled` for each try that RocksDB refuses. Return False after one, with nothing written, unless it `waits`.
    Raises what the binding raises, also after `STALL_S` of stalls.
    """
    until_s, pause_s = 0.0, FIRST_PAUSE_S
    while True:
        try:
            db.write(_batch(handles, writes), options)  # the binding consumes a batch, also one that is refused
            return True
        except Exception as error:  # rocksdict raises plain Exception for every failure
            now_s = time.monotonic()
            until_s = until_s or now_s + STALL_S
            if STALLED not in str(error) or now_s >= until_s:
                raise
        stalled()
        if not waits:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_PAUSE_S)


def _batch(handles: Mapping[str, Any], writes: Sequence[Write]) -> Any:
    batch = rocksdict.WriteBatch(raw_mode=True)
    put, delete = batch.put, batch.delete
    for write in writes:
        if write.value is None:
            delete(write.key, handles[write.family])
        else:
            put(write.key, write.value, handles[write.family])
    return batch
