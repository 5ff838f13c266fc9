"""Files and records over gRPC, on a whole queue service with a store in memory; the contract of what keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.files.v1 import files_pb2 as pb
from penstock.files.v1 import files_pb2_grpc
from penstock.limits import PART_BYTES
from penstock.queue.v1 import queue_pb2
from services.clock import SystemClock
from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.core.lifecycle import State
from services.queue.files import changes
from services.queue.files.rows import file_key, part_key, read_file, record_key
from services.queue.files.servicer import MAX_VALUE_BYTES
from services.queue.files.shelf import RECORDS_AT_ONCE, Shelf
from services.queue.storage import rocksdb_store
from services.queue.storage.recovery import recover
from services.queue.storage.rocksdb_store import RocksdbStore
from services.queue.storage.store import Row, Store, StoreDamagedError, StoreError, StoreUnusableError
from services.queue.storage.verify import Verifier
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.queueing import Queue, meta
from tests.support.serving import Peer, serving, text

FULL = bytes(PART_BYTES)
TAIL = b"the end"


class ShortStore(MemoryStore):
    """A store whose writes fail on demand, and that counts them."""

    fails = False
    writes_seen = 0
    damaged = b""
    most_scanned_bytes = 0
    before_part: Callable[[], None] | None = None
    """What happens between the look at a file and that at its content."""

    def get(self, family: str, key: bytes) -> bytes | None:
        """Read, unless the row is damaged."""
        if self.damaged and key == self.damaged:
            raise StoreDamagedError("Corruption: block checksum mismatch")
        if family == r.PARTS and self.before_part is not None:
            self.before_part()
        return super().get(family, key)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Read rows, unless one of them is damaged."""
        return self._checked(super().scan(family, start, end, limit))

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[Row]:
        """Read rows from the end, unless one of them is damaged."""
        return self._checked(super().scan_back(family, start, end, limit))

    def _checked(self, rows: list[Row]) -> list[Row]:
        self.most_scanned_bytes = max(self.most_scanned_bytes, sum(len(row) for _, row in rows))
        if self.damaged in [key for key, _ in rows]:
            raise StoreDamagedError("Corruption: block checksum mismatch")
        return rows

    def write(self, writes: Any) -> None:
        """Write, or fail."""
        if self.fails:
            raise StoreError("Input/output error")
        self.writes_seen += 1
        super().write(writes)


@pytest.fixture
def store() -> ShortStore:
    return ShortStore()


@pytest.fixture
async def peer(store: ShortStore) -> AsyncIterator[Peer]:
    async with serving(Telemetry(None), store) as peer:
        yield peer


@pytest.fixture
def stub(peer: Peer) -> Any:
    return files_pb2_grpc.FilesServiceStub(peer.channel)


async def upload(stub: Any, name: str, *parts: bytes, **fields: Any) -> pb.File:
    await stub.CreateFile(pb.CreateFileRequest(file_id=name))
    size = 0
    for part in parts:
        await stub.AppendFile(pb.AppendFileRequest(file_id=name, offset=size, data=part))
        size += len(part)
    response = await stub.CloseFile(pb.CloseFileRequest(file_id=name, bytes=size, **fields))
    file: pb.File = response.file
    return file


def put(name: str, value: bytes, revision: int = 0, **fields: Any) -> pb.PutRecord:
    record = pb.Record(kind="batch", record_id=name, value=value, revision=revision, **fields)
    return pb.PutRecord(record=record)


def sound(store: Store) -> list[str]:
    found = [violation.line() for violation in Verifier(store).violations()]
    return [line for line in found if not line.startswith("meta")]


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_a_file_is_what_was_appended(stub: Any, store: Store) -> None:
    file = await upload(stub, "file-1", FULL, TAIL, filename="in.jsonl", purpose="batch", expires_after_ns=10**18)
    assert (file.bytes, file.filename, file.purpose, file.uploading) == (PART_BYTES + 7, "in.jsonl", "batch", False)
    assert file.expires_unix_ns == file.created_unix_ns + 10**18
    for offset, expected in ((0, FULL), (PART_BYTES - 3, FULL[:3]), (PART_BYTES, TAIL), (PART_BYTES + 7, b"")):
        read = await stub.ReadFile(pb.ReadFileRequest(file_id="file-1", offset=offset))
        assert read.data == expected
    assert sound(store) == []
    assert (await stub.DeleteFile(pb.DeleteFileRequest(file_id="file-1"))).deleted
    assert not (await stub.DeleteFile(pb.DeleteFileRequest(file_id="file-1"))).deleted
    assert store.scan(r.PARTS, b"", b"", 10) == []
    assert await code_of(stub.ReadFile(pb.ReadFileRequest(file_id="file-1"))) is grpc.StatusCode.NOT_FOUND


async def test_a_file_that_goes_while_it_is_read_is_gone_and_not_over(stub: Any, store: ShortStore) -> None:
    await upload(stub, "f", FULL, TAIL)

    def delete() -> None:
        store.write(
            [Write(family, key, None) for family in (r.FILES, r.PARTS) for key, _ in store.scan(family, b"", b"", 9)]
        )

    store.before_part = delete
    assert await code_of(stub.ReadFile(pb.ReadFileRequest(file_id="f"))) is grpc.StatusCode.NOT_FOUND


async def test_a_file_without_one_of_its_parts_is_damaged_and_not_over(stub: Any, store: ShortStore) -> None:
    await upload(stub, "f", FULL, TAIL)
    store.write([Write(r.PARTS, part_key("f", PART_BYTES), None)])
    read = pb.ReadFileRequest(file_id="f", offset=PART_BYTES)
    assert await code_of(stub.ReadFile(read)) is grpc.StatusCode.DATA_LOSS


async def test_every_step_of_an_upload_can_be_repeated(stub: Any) -> None:
    create = pb.CreateFileRequest(file_id="f")
    append = pb.AppendFileRequest(file_id="f", offset=0, data=TAIL)
    close = pb.CloseFileRequest(file_id="f", bytes=7)
    for call, request in ((stub.CreateFile, create), (stub.AppendFile, append), (stub.CloseFile, close)):
        assert await call(request) == await call(request)


async def test_an_upload_that_goes_wrong_is_refused(stub: Any) -> None:
    await upload(stub, "closed", TAIL)
    await stub.CreateFile(pb.CreateFileRequest(file_id="open"))
    late = pb.AppendFileRequest(file_id="closed", offset=0, data=TAIL)
    gap = pb.AppendFileRequest(file_id="open", offset=PART_BYTES, data=TAIL)
    assert await code_of(stub.AppendFile(late)) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code_of(stub.AppendFile(gap)) is grpc.StatusCode.OUT_OF_RANGE
    await stub.AppendFile(pb.AppendFileRequest(file_id="open", offset=0, data=TAIL))
    other = pb.AppendFileRequest(file_id="open", offset=0, data=b"THE END")
    assert await code_of(stub.AppendFile(other)) is grpc.StatusCode.OUT_OF_RANGE
    short = pb.CloseFileRequest(file_id="open", bytes=6)
    assert await code_of(stub.CloseFile(short)) is grpc.StatusCode.FAILED_PRECONDITION
    assert await code_of(stub.CreateFile(pb.CreateFileRequest(file_id="closed"))) is grpc.StatusCode.ALREADY_EXISTS
    nobody = pb.AppendFileRequest(file_id="nobody", offset=0, data=TAIL)
    assert await code_of(stub.AppendFile(nobody)) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("CreateFile", pb.CreateFileRequest(), "file_id"),
        ("CreateFile", pb.CreateFileRequest(file_id="a b"), "file_id"),
        ("CreateFile", pb.CreateFileRequest(file_id="a", view="/"), "view"),
        ("AppendFile", pb.AppendFileRequest(file_id="a"), "data"),
        ("AppendFile", pb.AppendFileRequest(file_id="a", offset=1, data=b"x"), "offset"),
        ("AppendFile", pb.AppendFileRequest(file_id="a", data=FULL + b"x"), "data"),
        ("CloseFile", pb.CloseFileRequest(file_id="a", filename="n" * 513), "filename"),
        ("CloseFile", pb.CloseFileRequest(file_id="a", expires_after_ns=-1), "expires_after_ns"),
        ("ListFiles", pb.ListFilesRequest(limit=1001), "limit"),
        ("ReadFile", pb.ReadFileRequest(file_id="a", offset=1 << 60), "offset"),
        ("PutRecords", pb.PutRecordsRequest(), "puts"),
        ("PutRecords", pb.PutRecordsRequest(puts=[put("a", b""), put("a", b"")]), "puts"),
        ("PutRecords", pb.PutRecordsRequest(puts=[put("a", FULL + b"x")]), "puts[0].record.value"),
        ("GetRecord", pb.GetRecordRequest(kind="batch"), "record_id"),
    ],
)
async def test_bad_calls_name_the_field(stub: Any, method: str, request_: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(stub, method)(request_)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith(f"{field}: ")


async def test_files_are_listed_in_pages_from_either_end(stub: Any) -> None:
    for number in range(5):
        await upload(stub, f"f{number}", purpose="batch" if number % 2 else "other")
    await stub.CreateFile(pb.CreateFileRequest(file_id="f9"))
    view = pb.CreateFileRequest(file_id="v", view="batch-1", filename="out", purpose="batch", bytes=12)
    assert (await stub.CreateFile(view)).file == (await stub.CreateFile(view)).file

    async def names(**fields: Any) -> tuple[list[str], bool]:
        page = await stub.ListFiles(pb.ListFilesRequest(**fields))
        return [file.file_id for file in page.files], page.has_more

    assert await names() == (["v", "f4", "f3", "f2", "f1", "f0"], False)
    assert await names(limit=2) == (["v", "f4"], True)
    assert await names(limit=4, after="f4") == (["f3", "f2", "f1", "f0"], False)
    assert await names(limit=2, after="f1", ascending=True) == (["f2", "f3"], True)
    assert await names(purpose="batch") == (["v", "f3", "f1"], False)
    assert await names(purpose="batch", limit=1, after="v") == (["f3"], True)


async def test_records_change_only_from_the_expected_revision_and_all_or_none(stub: Any) -> None:
    async def change(*puts: pb.PutRecord) -> list[int]:
        return list((await stub.PutRecords(pb.PutRecordsRequest(puts=puts))).revisions)

    assert await change(put("a", b"1"), put("b", b"1")) == [1, 1]
    assert await change(put("a", b"2", 1)) == [2]
    for stale in (put("a", b"3"), put("a", b"3", 1), put("c", b"3", 1)):
        assert await code_of(change(put("b", b"9", 1), stale)) is grpc.StatusCode.ABORTED
    gone = pb.PutRecord(record=pb.Record(kind="batch", record_id="b", revision=1), delete=True)
    assert await change(gone) == [0]
    assert await change(gone) == [0], "a deletion can be repeated"
    found = (await stub.GetRecord(pb.GetRecordRequest(kind="batch", record_id="a"))).record
    assert (found.value, found.revision) == (b"2", 2)
    assert await code_of(stub.GetRecord(pb.GetRecordRequest(kind="batch", record_id="b"))) is grpc.StatusCode.NOT_FOUND
    assert await code_of(stub.GetRecord(pb.GetRecordRequest(kind="bat", record_id="a"))) is grpc.StatusCode.NOT_FOUND


async def test_one_of_many_that_change_a_record_at_once_succeeds(stub: Any) -> None:
    calls = [stub.PutRecords(pb.PutRecordsRequest(puts=[put("a", bytes([n]))])) for n in range(20)]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(not isinstance(answer, Exception) for answer in done) == 1


async def test_records_are_listed_by_kind(stub: Any) -> None:
    puts = [put(f"r{n}", b"x") for n in range(3)]
    other = pb.PutRecord(record=pb.Record(kind="batch2", record_id="r1", value=b"y"))
    await stub.PutRecords(pb.PutRecordsRequest(puts=[*puts, other]))
    page = await stub.ListRecords(pb.ListRecordsRequest(kind="batch", limit=2))
    assert ([record.record_id for record in page.records], page.has_more) == (["r2", "r1"], True)
    page = await stub.ListRecords(pb.ListRecordsRequest(kind="batch", after="r1", ascending=True))
    assert ([record.record_id for record in page.records], page.has_more) == (["r2"], False)


async def test_what_is_due_is_swept(stub: Any, peer: Peer, store: Store) -> None:
    await upload(stub, "old", TAIL, expires_after_ns=1)
    await upload(stub, "kept", TAIL)
    await stub.PutRecords(pb.PutRecordsRequest(puts=[put("old", b"", expires_unix_ns=1), put("kept", b"")]))
    await stub.CreateFile(pb.CreateFileRequest(file_id="left"))
    await stub.AppendFile(pb.AppendFileRequest(file_id="left", data=TAIL))
    left = read_file(store.get(r.FILES, file_key("left")) or b"")
    left.touched_unix_ns -= changes.ABANDONED_NS
    store.write([Write(r.FILES, file_key("left"), left.SerializeToString())])
    await stub.CreateFile(pb.CreateFileRequest(file_id="going-on"))
    while await peer.service._shelf.sweep():
        pass
    assert [key for key, _ in store.scan(r.FILES, b"", b"", 9)] == [b"going-on", b"kept"]
    assert [key for key, _ in store.scan(r.PARTS, b"", b"", 9)] == [part_key("kept", 0)]
    assert [key for key, _ in store.scan(r.RECORDS, b"", b"", 9)] == [record_key("batch", "kept")]


async def test_a_damaged_row_does_not_stop_the_sweep(stub: Any, peer: Peer, store: Store) -> None:
    await upload(stub, "old", TAIL, expires_after_ns=1)
    store.write([Write(r.FILES, b"bad", b"\xff"), Write(r.RECORDS, b"bad", b"\xff")])
    while await peer.service._shelf.sweep():
        pass
    assert [key for key, _ in store.scan(r.FILES, b"", b"", 9)] == [b"bad"]


async def test_large_records_are_read_a_few_at_a_time(peer: Peer, stub: Any, store: ShortStore) -> None:
    value = bytes(MAX_VALUE_BYTES)
    for n in range(24):
        await stub.PutRecords(pb.PutRecordsRequest(puts=[put(f"r{n:02}", value)]))
    await peer.service._shelf.sweep()
    names: list[str] = []
    more = True
    while more:
        request = pb.ListRecordsRequest(kind="batch", after=names[-1] if names else "", ascending=True)
        page, more = await peer.service._shelf.records(request, 100)
        names += [record.record_id for record in page]
    assert names == [f"r{n:02}" for n in range(24)]
    assert store.most_scanned_bytes <= RECORDS_AT_ONCE * (MAX_VALUE_BYTES + 100)


async def test_rows_before_and_behind_one_that_fails_its_checksum_are_swept(
    stub: Any, peer: Peer, store: ShortStore
) -> None:
    for name in ("a-due", "m-bad", "z-due"):
        await upload(stub, name, TAIL, expires_after_ns=0 if name == "m-bad" else 1)
    await stub.PutRecords(pb.PutRecordsRequest(puts=[put("old", b"", expires_unix_ns=1)]))
    store.damaged = file_key("m-bad")
    for _ in range(3):
        await peer.service._shelf.sweep()
    assert [name for name in ("a-due", "z-due") if store.get(r.FILES, file_key(name)) is not None] == []
    assert store.scan(r.RECORDS, b"", b"", 9) == []


async def test_a_damaged_row_is_told_from_a_disk_that_does_not_answer_and_noted(
    stub: Any, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.write([Write(r.FILES, b"bad", b"\xff"), Write(r.RECORDS, record_key("batch", "bad"), b"\xff")])
    record = pb.GetRecordRequest(kind="batch", record_id="bad")
    for call in (stub.GetFile(pb.GetFileRequest(file_id="bad")), stub.GetRecord(record)):
        assert await code_of(call) is grpc.StatusCode.DATA_LOSS
    assert caplog.text.count("the store cannot be read: a row of") == 2


async def test_a_damaged_row_refuses_its_own_changes_alone(stub: Any, store: Store) -> None:
    await stub.CreateFile(pb.CreateFileRequest(file_id="good"))
    store.write([Write(r.FILES, b"bad", b"\xff"), Write(r.RECORDS, record_key("batch", "bad"), b"\xff")])
    delete = stub.DeleteFile(pb.DeleteFileRequest(file_id="bad"))
    append = stub.AppendFile(pb.AppendFileRequest(file_id="bad", data=TAIL))
    record = stub.PutRecords(pb.PutRecordsRequest(puts=[put("new", b""), put("bad", b"")]))
    codes = [await code_of(call) for call in (delete, append, record)]
    assert set(codes) == {grpc.StatusCode.DATA_LOSS}
    await stub.AppendFile(pb.AppendFileRequest(file_id="good", data=TAIL))
    assert [key for key, _ in store.scan(r.RECORDS, b"", b"", 9)] == [record_key("batch", "bad")]


async def test_a_row_that_fails_its_checksum_refuses_its_own_change_alone(store: ShortStore) -> None:
    store.damaged = file_key("bad")
    shelf = Shelf(store, SystemClock(), lambda _: None)

    def create(name: str) -> Callable[[changes.Draft], pb.File]:
        return lambda draft: changes.create(draft, pb.CreateFileRequest(file_id=name))

    waiting = [asyncio.create_task(shelf.change(create(name))) for name in ("a", "bad", "b")]
    await asyncio.sleep(0)
    shelf.stop()
    await shelf.run()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [pb.File, StoreDamagedError, pb.File]
    assert [key for key, _ in store.scan(r.FILES, b"", b"", 9)] == [file_key("a"), file_key("b")]


async def test_a_failed_write_is_told_and_changes_nothing(stub: Any, peer: Peer, store: ShortStore) -> None:
    store.fails = True
    request = pb.PutRecordsRequest(puts=[put("a", b"")])
    assert await code_of(stub.PutRecords(request)) is grpc.StatusCode.UNAVAILABLE
    store.fails = False
    assert list((await stub.PutRecords(request)).revisions) == [1]
    await peer.stub.Stats(queue_pb2.StatsRequest())


async def test_changes_that_wait_together_share_a_sync(store: ShortStore) -> None:
    shelf = Shelf(store, SystemClock(), lambda _: None)

    def put_one(number: int) -> Callable[[changes.Draft], list[int]]:
        return lambda draft: changes.put_records(draft, [put(f"r{number}", b"")])

    waiting = [asyncio.create_task(shelf.change(put_one(number))) for number in range(50)]
    await asyncio.sleep(0)
    shelf.stop()
    await shelf.run()
    assert [await task for task in waiting] == [[1]] * 50
    assert store.writes_seen == 1


DAMAGE = [
    (Write(r.PARTS, part_key("f", 0), None), "files 66: has no part at 0"),
    (Write(r.PARTS, part_key("f", PART_BYTES), b"short"), "5 bytes at 1048576 of a file of 1048583"),
    (Write(r.PARTS, part_key("f", 2 * PART_BYTES), b"more"), "4 bytes at 2097152 of a file of 1048583"),
    (Write(r.PARTS, part_key("g", 0), TAIL), "there is no file 'g' with content"),
    (Write(r.PARTS, b"x", TAIL), "parts 78: cannot be read"),
    (Write(r.FILES, b"g", b"\xff"), "files 67: cannot be read"),
    (Write(r.FILES, b"g", pb.File(file_id="h").SerializeToString()), "files 67: cannot be read"),
    (Write(r.FILES, b"v", pb.File(file_id="v", view="b", uploading=True).SerializeToString()), "is a view of 'b'"),
    (Write(r.RECORDS, b"x", b""), "records 78: cannot be read"),
    (Write(r.RECORDS, b"k\0n", pb.Record(kind="k", record_id="n").SerializeToString()), "has revision 0"),
]


@pytest.mark.parametrize(("write", "expected"), DAMAGE, ids=[text for _, text in DAMAGE])
def test_a_verification_names_damage(write: Write, expected: str) -> None:
    store = Queue().store
    draft = changes.Draft(store, 1)
    changes.create(draft, pb.CreateFileRequest(file_id="f"))
    for offset, data in ((0, FULL), (PART_BYTES, TAIL)):
        changes.append(draft, pb.AppendFileRequest(file_id="f", offset=offset, data=data))
    changes.put_records(draft, [put("a", b"1")])
    store.write(draft.writes)
    assert sound(store) == []
    store.write([write])
    assert any(expected in line for line in sound(store)), sound(store)


def test_a_directory_of_version_1_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_store, "FAMILIES", (*r.REQUEST_FAMILIES, r.META))
    old = RocksdbStore(tmp_path / "data")
    queue = Queue(store=old)
    queue.submit(meta(idempotency_key="k", batch="b"))
    old.write([Write(r.META, r.SCHEMA_KEY, b"1")])
    old.close()
    monkeypatch.undo()
    with pytest.raises(StoreUnusableError, match="older version"):
        RocksdbStore(tmp_path / "data", read_only=True)
    new = RocksdbStore(tmp_path / "data")
    assert new.get(r.META, r.SCHEMA_KEY) == b"3"
    (entry,) = recover(new).entries
    assert (entry.meta.idempotency_key, entry.state) == ("k", State.READY)
    assert list(Verifier(new).violations()) == []
    draft = changes.Draft(new, 1)
    changes.create(draft, pb.CreateFileRequest(file_id="f"))
    new.write(draft.writes)
    new.close()
    monkeypatch.setattr(rocksdb_store, "FAMILIES", (*r.REQUEST_FAMILIES, r.META))
    with pytest.raises(StoreUnusableError, match="newer version"):
        RocksdbStore(tmp_path / "data")


async def test_requests_go_on_beside_files(stub: Any, peer: Peer) -> None:
    names, file = await asyncio.gather(peer.submit(text()), upload(stub, "f", FULL, FULL, TAIL))
    assert len(names) == 1
    assert file.bytes == 2 * PART_BYTES + 7
