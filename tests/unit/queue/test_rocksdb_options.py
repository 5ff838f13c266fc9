"""RocksDB's logs are bounded."""

import os
from pathlib import Path

import pytest

from services.queue.core.effects import Write
from services.queue.core.records import META, PAYLOADS, seq_key
from services.queue.settings import QueueSettings
from services.queue.storage import rocksdb_options
from services.queue.storage.rocksdb_store import RocksdbStore
from tests.support.sizes import sizes_bytes

BODY = os.urandom(200_000)


def test_the_log_is_clearly_smaller_than_the_watermark(tmp_path: Path) -> None:
    """Families that write little do not keep the log of those that write much."""
    watermark_bytes = QueueSettings.model_fields["disk_free_min_bytes"].default
    store = RocksdbStore(tmp_path)
    store.write([Write(META, b"k", b"v")])
    largest = 0
    for _ in range(8):
        store.write([Write(PAYLOADS, seq_key(n), BODY) for n in range(100)])
        largest = max(largest, sum(sizes_bytes(tmp_path, "*.log")))
    store.close()
    assert largest < watermark_bytes / 2


def test_the_text_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_options, "INFO_LOG_BYTES", bound := 200_000)  # all options stand at its beginning
    store = RocksdbStore(tmp_path)
    for n in range(60):
        store.write([Write(META, b"k", str(n).encode())])
        store._families[META].flush(True)
    sizes = sizes_bytes(tmp_path, "LOG*")
    store.close()
    assert max(sizes) < bound * 1.1
    assert len(sizes) <= 2
