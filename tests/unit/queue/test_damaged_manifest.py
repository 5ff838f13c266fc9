"""Damage of the MANIFEST, which names the table files: what it no longer names is never taken for what never was."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.storage.recovery import store_id_of
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import StoreUnusableError
from tests.support.memory_store import MemoryStore
from tests.support.queueing import Queue, meta


def deleted(store: RocksdbStore, keys: Sequence[bytes]) -> None:
    store.write([Write(r.META, key, None) for key in keys])
    store.close()


def test_a_store_that_was_written_and_has_no_schema_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    deleted(RocksdbStore(tmp_path), [r.SCHEMA_KEY])
    for _ in range(2):
        with pytest.raises(StoreUnusableError, match=r"is damaged: it has \d+ writes, and not the first.*restore"):
            RocksdbStore(tmp_path)


def test_a_start_that_was_killed_before_its_first_write_is_done_again(tmp_path: Path) -> None:
    live, killed = tmp_path / "live", tmp_path / "killed"
    store = RocksdbStore(live)
    shutil.copytree(live, killed)
    store.close()
    (log,) = killed.glob("*.log")
    log.write_bytes(b"")
    (killed / "PENSTOCK_SYNCED").write_bytes(b"")
    again = RocksdbStore(killed)
    assert again.get(r.META, r.SCHEMA_KEY) is not None
    again.close()


@pytest.mark.parametrize("family", [r.REQUESTS, r.RESULTS, r.IDEMPOTENCY, r.RECORDS])
def test_a_store_with_rows_and_no_name_is_given_no_other(family: str) -> None:
    store = MemoryStore()
    store.write([Write(r.META, r.SCHEMA_KEY, b"3"), Write(family, b"k", b"v")])
    with pytest.raises(StoreUnusableError, match=f"the store is damaged: it has rows of {family} and no name.*backup"):
        store_id_of(store, lambda: secrets.token_hex(4))
    assert store.get(r.META, r.STORE_ID_KEY) is None


def test_a_store_with_counters_and_no_name_is_given_no_other() -> None:
    queue = Queue()
    queue.submit(meta())
    for family in (r.REQUESTS, r.PAYLOADS, r.READY, r.IDEMPOTENCY):
        queue.store.write([Write(family, key, None) for key, _ in queue.store.scan(family, b"", b"", 10)])
    queue.store.write([Write(r.META, r.STORE_ID_KEY, None)])
    with pytest.raises(StoreUnusableError, match="has rows of meta and no name"):
        store_id_of(queue.store, lambda: secrets.token_hex(4))


def test_a_new_store_is_named() -> None:
    store = MemoryStore()
    store.write([Write(r.META, r.SCHEMA_KEY, b"3")])
    assert store_id_of(store, lambda: "fresh") == "fresh"
