"""Writes that RocksDB would have wait: they wait without the interpreter's lock, and hear of a flush that fails."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
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


def test_who_cannot_wait_makes_one_try(tmp_path: Path) -> None:
    store, db, told = RocksdbStore(tmp_path), StalledDb(STALL), []
    args = (db, store._handles, WRITES, write_options(), lambda: told.append(1), False)
    assert [write_batch(*args), write_batch(*args)] == [False, True]
    store.close()
    assert (len(db.batches), told) == (2, [1])


def test_a_stall_keeps_a_write_that_is_made_at_once_from_waiting(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.write([Write(META, b"a", b"1")])
    store._families[META].flush(True)
    stop_at(store, 1)
    assert not store.write_at_once([Write(META, b"a", b"2")])
    assert (store.get(META, b"a"), store.write_failure()) == (b"1", "")
    assert store._space._gives_way, "and what gives space back ends"
    stop_at(store, 36)
    assert store.write_at_once([Write(META, b"a", b"2")])
    assert store.get(META, b"a") == b"2"
    store.close()


def test_another_write_does_too(tmp_path: Path) -> None:
    store, answers = RocksdbStore(tmp_path), list[bool]()
    other = threading.Thread(target=lambda: answers.append(store.write_at_once(WRITES)))
    with store._writing:
        other.start()
        other.join(30)
    assert answers == [False]
    assert store.write_at_once(WRITES)
    store.close()


def stop_at(store: RocksdbStore, tables: int) -> None:
    """Have a family stall from so many table files on."""
    names = ("level0_stop_writes_trigger", "level0_slowdown_writes_trigger")
    store._families[META].set_options(dict.fromkeys(names, str(tables)))


def test_table_files_that_gather_during_a_long_compaction_stop_no_writes(tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store._families[META].set_options({"level0_file_num_compaction_trigger": "1000"})
    for n in range(40):
        assert store.write_at_once([Write(META, b"a", str(n).encode())])
        store._families[META].flush(True)
    assert store._families[META].property_value("rocksdb.num-files-at-level0") == "40"
    assert store.write_at_once([Write(META, b"a", b"")])
    store.close()


def test_one_compaction_leaves_others_a_thread_and_by_itself_moves_no_blob(tmp_path: Path) -> None:
    RocksdbStore(tmp_path).close()
    options = max(tmp_path.glob("OPTIONS-*")).read_text()
    assert re.findall(r"max_background_jobs=(\d+)", options) == ["4"]
    assert set(re.findall(r"enable_blob_garbage_collection=(\w+)", options)) == {"false"}


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
