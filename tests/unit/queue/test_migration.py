"""A data directory as version 2 of the schema left it, opened by this program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.value import fields
from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT, RequestMeta
from services.queue.core.messages import Cancel, Claim, Delete, EndedRow, WorkerOpened
from services.queue.storage.migration import migrate
from services.queue.storage.recovery import recover
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import Store, StoreError, StoreUnusableError
from services.queue.storage.verify import Verifier
from tests.support.queueing import PAYLOAD, Queue, meta


def old_meta_row(meta: RequestMeta) -> bytes:
    """Return a row of `requests` as version 2 wrote it: no payload_bytes, and a tenant that may be empty."""
    values = fields(meta.replace(tenant=old_tenant(meta.tenant)))
    del values["payload_bytes"]
    return json.dumps([1, *values.values()], separators=(",", ":")).encode()


def old_tenant(tenant: str) -> str:
    return "" if tenant == DEFAULT_TENANT else tenant


def old_text(text: str) -> bytes:
    return len(text.encode()).to_bytes(2, "big") + text.encode()


def age(store: Store) -> None:
    """Write the rows of a store of the present schema as version 2 would have written them."""
    writes = [Write(r.META, r.SCHEMA_KEY, b"2")]
    for key, row in store.scan(r.REQUESTS, b"", b"", 1000):
        writes.append(Write(r.REQUESTS, key, old_meta_row(r.decode_meta(row))))
    for key, row in store.scan(r.RESULTS, b"", b"", 1000):
        head, body = r.decode_result(row)
        old = head._replace(tenant=old_tenant(head.tenant))
        writes.append(Write(r.RESULTS, key, r.encode_result(old, body)))
        writes.append(Write(r.COMPLETIONS, r.completion_key(head.batch_key, head.completion_seq), None))
        place = head.completion_seq.to_bytes(8, "big")
        writes.append(Write(r.COMPLETIONS, old_text(head.batch) + place, key))
    for key, row in store.scan(r.IDEMPOTENCY, b"", b"", 1000):
        length = int.from_bytes(key[:2], "big")
        tenant, name = key[2 : 2 + length].decode(), key[2 + length :].decode()
        writes.append(Write(r.IDEMPOTENCY, key, None))
        writes.append(Write(r.IDEMPOTENCY, old_text(old_tenant(tenant)) + name.encode(), row))
    store.write(writes)


def everything(store: Store) -> dict[str, list[tuple[bytes, bytes]]]:
    """Return every row, with results as they are read."""
    rows = {family: store.scan(family, b"", b"", 1000) for family in r.FAMILIES}
    rows[r.RESULTS] = [(key, r.encode_result(*r.decode_result(row))) for key, row in rows[r.RESULTS]]
    return rows


def filled(store: Store) -> None:
    """Put requests of two tenants into every state into a store of the present schema."""
    queue = Queue(store=store)
    size = {"payload_bytes": len(PAYLOAD)}
    names = queue.submit(
        meta(idempotency_key="a", batch="b", **size),
        meta(idempotency_key="a", batch="b", tenant="acme", **size),
        meta(batch="b", **size),
        meta(idempotency_key="ü", tenant="acme", **size),
        meta(idempotency_key="k", batch="", **size),
    )
    queue.step(Cancel(1, (names[1], names[2])))
    queue.step(WorkerOpened(1, "w", "life", ()), Claim(1, names[3]))
    queue.step(Cancel(2, (names[4],)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = RocksdbStore(tmp_path / "data")
    filled(store)
    store.close()
    return tmp_path / "data"


def test_old_rows_become_those_of_this_version(path: Path) -> None:
    store = RocksdbStore(path)
    wanted = everything(store)
    age(store)
    assert everything(store) != wanted
    store.close()
    store = RocksdbStore(path)
    assert everything(store) == wanted
    assert list(Verifier(store).violations()) == []
    entries = {entry.seq: entry for entry in recover(store).entries}
    assert [entries[seq].meta.tenant for seq in sorted(entries)] == [DEFAULT_TENANT, "acme"]
    assert {entry.meta.payload_bytes for entry in entries.values()} == {len(PAYLOAD)}
    assert store.get(r.IDEMPOTENCY, r.idempotency_key(DEFAULT_TENANT, "a")) == r.seq_key(1)
    store.close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_key_that_no_tenant_and_the_default_one_had_is_one_request_s(tmp_path: Path, ended: bool) -> None:
    """Version 2 told the two apart. Deleting the result of the one that lost it leaves the other its key."""
    store = RocksdbStore(tmp_path / "data")
    queue = Queue(store=store)
    size = {"payload_bytes": len(PAYLOAD)}
    first, _ = queue.submit(meta(idempotency_key="k", **size), meta(idempotency_key="k", tenant="acme", **size))
    if ended:
        queue.step(Cancel(1, (first,)))
    age(store)
    ((key, row),) = store.scan(r.REQUESTS, r.seq_key(2), b"", 1)
    named, named_now = old_text("acme") + b"k", old_text(DEFAULT_TENANT) + b"k"
    acme = store.get(r.IDEMPOTENCY, named)
    renamed = Write(r.REQUESTS, key, row.replace(b'"acme"', f'"{DEFAULT_TENANT}"'.encode()))
    store.write([renamed, Write(r.IDEMPOTENCY, named, None), Write(r.IDEMPOTENCY, named_now, acme)])
    store.close()

    store = RocksdbStore(tmp_path / "data")
    assert list(Verifier(store).violations()) == []
    queue = Queue(store=store)
    queue.step(Cancel(1, (first,)))
    head, _ = r.decode_result(store.get(r.RESULTS, r.seq_key(1)) or b"")
    queue.step(Delete(2, (EndedRow(1, *head),)))
    assert store.get(r.IDEMPOTENCY, r.idempotency_key(DEFAULT_TENANT, "k")) == r.seq_key(2)
    assert list(Verifier(store).violations()) == []
    store.close()


def test_a_row_that_ends_early_is_not_brought_up_to_date(path: Path) -> None:
    store = RocksdbStore(path)
    age(store)
    ((key, row),) = store.scan(r.REQUESTS, b"", b"", 1)
    short = json.dumps(json.loads(row)[:-2]).encode()
    store.write([Write(r.REQUESTS, key, short)])
    store.close()
    with pytest.raises(StoreUnusableError, match="cannot be brought up to date"):
        RocksdbStore(path)


class Dying:
    """A store that dies after some writes."""

    def __init__(self, store: Store, writes: int) -> None:
        self._store, self._left = store, writes

    def write(self, writes: list[Write]) -> None:
        if not self._left:
            raise StoreError("killed")
        self._left -= 1
        self._store.write(writes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("writes", range(4))
def test_one_that_was_killed_goes_on(path: Path, writes: int) -> None:
    store = RocksdbStore(path)
    wanted = everything(store)
    age(store)
    with pytest.raises(StoreError, match="killed"):
        migrate(Dying(store, writes))  # type: ignore[arg-type]
    assert store.get(r.META, r.SCHEMA_KEY) == b"2"
    migrate(store)
    assert everything(store) == wanted
    store.close()


def test_a_row_that_cannot_be_read_is_told(path: Path) -> None:
    store = RocksdbStore(path)
    age(store)
    store.write([Write(r.REQUESTS, r.seq_key(1), b"[1,")])
    store.close()
    with pytest.raises(StoreUnusableError, match="cannot be brought up to date"):
        RocksdbStore(path)
