"""What the shelf takes as its disk fills up: content first not, and at the end only what frees space."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.files.v1 import files_pb2 as pb
from penstock.files.v1 import files_pb2_grpc
from services.queue.core import records as r
from services.queue.files.rows import file_key, record_key
from services.queue.storage.health import NO_ROOM, Event
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, serving

TAIL = b"the end"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def peer(store: MemoryStore) -> AsyncIterator[Peer]:
    async with serving(Telemetry(None), store) as peer:
        yield peer


@pytest.fixture
def stub(peer: Peer) -> Any:
    return files_pb2_grpc.FilesServiceStub(peer.channel)


async def upload(stub: Any, name: str, expires_after_ns: int = 0) -> None:
    await stub.CreateFile(pb.CreateFileRequest(file_id=name))
    await stub.AppendFile(pb.AppendFileRequest(file_id=name, data=TAIL))
    await stub.CloseFile(pb.CloseFileRequest(file_id=name, bytes=len(TAIL), expires_after_ns=expires_after_ns))


def put(name: str, value: bytes, revision: int = 0) -> pb.PutRecord:
    return pb.PutRecord(record=pb.Record(kind="batch", record_id=name, value=value, revision=revision))


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_content_is_refused_when_the_disk_is_nearly_full_and_a_batch_ends(
    stub: Any, peer: Peer, store: MemoryStore
) -> None:
    await stub.CreateFile(pb.CreateFileRequest(file_id="f"))
    await stub.PutRecords(pb.PutRecordsRequest(puts=[put("a", b"begun")]))
    store.free_bytes = 1
    peer.service.committer.health._disk_checked_ns = 1
    append = pb.AppendFileRequest(file_id="f", data=TAIL)
    assert await code_of(stub.AppendFile(append)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    begin = pb.PutRecordsRequest(puts=[put("a", b"", 1), put("b", b"begun")])
    assert await code_of(stub.PutRecords(begin)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.PutRecords(pb.PutRecordsRequest(puts=[put("a", b"ended", 1)]))
    await stub.CreateFile(pb.CreateFileRequest(file_id="output", view="a"))
    await stub.DeleteFile(pb.DeleteFileRequest(file_id="f"))


async def test_only_what_frees_space_is_taken_into_the_last_room(stub: Any, peer: Peer, store: MemoryStore) -> None:
    names = ("due", "gone", "kept")
    for name in names:
        await upload(stub, name, expires_after_ns=1 if name == "due" else 0)
    await stub.CreateFile(pb.CreateFileRequest(file_id="open"))
    await stub.PutRecords(pb.PutRecordsRequest(puts=[put(name, b"value") for name in names]))
    health = peer.service.committer.health
    health._take(Event.RUNS_OUT, NO_ROOM)
    health._probe_at_ns = 1 << 62
    gone = pb.PutRecord(record=pb.Record(kind="batch", record_id="gone", revision=1), delete=True)
    refused = [
        stub.PutRecords(pb.PutRecordsRequest(puts=[put("kept", b"", 1)])),
        stub.PutRecords(pb.PutRecordsRequest(puts=[gone, put("kept", b"", 1)])),
        stub.CreateFile(pb.CreateFileRequest(file_id="new")),
        stub.AppendFile(pb.AppendFileRequest(file_id="open", data=TAIL)),
        stub.CloseFile(pb.CloseFileRequest(file_id="open")),
    ]
    assert [await code_of(call) for call in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * len(refused)
    await stub.PutRecords(pb.PutRecordsRequest(puts=[gone]))
    await stub.DeleteFile(pb.DeleteFileRequest(file_id="gone"))
    await peer.service._shelf.sweep()
    assert [key for key, _ in store.scan(r.FILES, b"", b"", 9)] == [file_key("kept"), file_key("open")]
    left = [key for key, _ in store.scan(r.RECORDS, b"", b"", 9)]
    assert left == [record_key("batch", "due"), record_key("batch", "kept")]
