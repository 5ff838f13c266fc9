"""Writes that RocksDB would have wait: they wait without the interpreter's lock, and hear of a flush that fails."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import FAMILIES, META
from services.queue.storage import batches
from services.queue.storage.batches import write_batch, write_options
from services.queue.storage.rocksdb_store import RocksdbStore

WRITES = [Write(META, b"a", b"1"), Write(META, b"b", None)]
STALL = "Result incomplete: Write stall"

A_STALL = """
import sys, threading
from pathlib import Path
from services.queue.core.effects import Write
from services.queue.core.records import META
from services.queue.storage import batches
from services.queue.storage.rocksdb_store import RocksdbStore

store = RocksdbStore(Path(sys.argv[1]))
store.write([Write(META, b"a", b"1")])
store._families[META].flush(True)
stalled, slept = threading.Event(), batches.time.sleep

def sleep(seconds):
    stalled.set()
    slept(seconds)

batches.time.sleep = sleep
store._families[META].set_options({"level0_stop_writes_trigger": "1", "level0_slowdown_writes_trigger": "1"})
writer = threading.Thread(target=store.write, args=([Write(META, b"a", b"2")],))
writer.start()
assert stalled.wait(30), "the interpreter goes on"
assert store.get(META, b"a") == b"1"
store._families[META].set_options({"level0_stop_writes_trigger": "36", "level0_slowdown_writes_trigger": "36"})
writer.join(30)
assert store.get(META, b"a") == b"2"
assert not store.write_failure()
store.close()
"""
"""A process of its own: the interpreter may stand still in it for ever."""


def test_a_write_that_has_to_wait_holds_nobody_up(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", A_STALL, str(tmp_path / "queue")], check=True, timeout=60)


class StalledDb:
    """A database that answers writes with these errors, and takes the one after."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.batches: list[Any] = []

    def write(self, batch: Any, options: Any) -> None:
        assert options.no_slowdown
        assert batch not in self.batches, "the binding takes none twice"
        self.batches.append(batch)
        if self.errors:
            raise Exception(self.errors.pop(0))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write to a database through the families of a store."""
    store = RocksdbStore(tmp_path)
    yield lambda db: write_batch(db, store._handles, WRITES, write_options())
    store.close()


def test_it_is_made_again_until_it_need_not_wait(write: Callable[[Any], None]) -> None:
    db = StalledDb(STALL, STALL, STALL)
    write(db)
    assert [len(batch) for batch in db.batches] == [2] * 4


def test_a_flush_that_fails_meanwhile_ends_it(write: Callable[[Any], None]) -> None:
    db = StalledDb(STALL, "IO error: No space left on device", "IO error: never asked")
    with pytest.raises(Exception, match="No space left"):
        write(db)
    assert len(db.batches) == 2


def test_it_does_not_wait_for_ever(write: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "STALL_S", 0.0)
    with pytest.raises(Exception, match="Write stall"):
        write(StalledDb(*[STALL] * 9))


def test_no_write_is_slowed_down_by_pauses(tmp_path: Path) -> None:
    RocksdbStore(tmp_path).close()
    options = max(tmp_path.glob("OPTIONS-*")).read_text()
    for slow, stop in (
        ("level0_slowdown_writes_trigger", "level0_stop_writes_trigger"),
        ("soft_pending_compaction_bytes_limit", "hard_pending_compaction_bytes_limit"),
    ):
        found = [re.findall(rf"{name}=(\d+)", options) for name in (slow, stop)]
        ours = [values[-len(FAMILIES) :] for values in found]
        assert ours[0] == ours[1]
