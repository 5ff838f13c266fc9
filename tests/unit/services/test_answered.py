"""Every status that a service gives says so, on every call: a client can tell the service's words from gRPC's."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.errors import (
    ANSWERED,
    BROKE_WHILE_WRITING,
    DISK_FULL,
    ERROR_CODE,
    LARGER_THAN_QUOTA,
    OVER_QUOTA,
    STORE_UNAVAILABLE,
)
from penstock.files.v1 import files_pb2
from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.auth.keyring import NotAllowedError, Reason
from services.queue.core.effects import Write
from services.queue.storage.store import StoreError
from services.rpc import strict
from services.rpc.strict import BadInputError, Doorkeeper, ReaderFailedError, abort_with_code, add_servicer
from services.scheduler.servicer import SchedulerServicer
from services.telemetry import Telemetry
from tests.support.keyed import Keyfile
from tests.support.memory_store import MemoryStore
from tests.support.scheduler_shell import Shell
from tests.support.serving import Peer, serving, text

ROOT = Path(__file__).resolve().parents[3]

QUEUE = queue_pb2.DESCRIPTOR.services_by_name["QueueService"]
FILES = files_pb2.DESCRIPTOR.services_by_name["FilesService"]
SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

METHODS = [method for service in (QUEUE, FILES, SCHEDULER, HEALTH, REFLECTION) for method in service.methods]
CALLS = pytest.mark.parametrize("method", METHODS, ids=[method.full_name for method in METHODS])


async def status_of(
    channel: grpc.aio.Channel, method: MethodDescriptor, messages: Sequence[bytes], *headers: tuple[str, str]
) -> tuple[grpc.StatusCode, dict[str, Any]]:
    """Return how a call with these messages ends, and the metadata of its status."""
    start: Any = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
    while True:
        call = start(iter(messages), metadata=headers)
        with suppress(grpc.aio.AioRpcError):
            async for _answer in call:
                pass
        if await call.details() != BROKE_WHILE_WRITING:  # grpc.aio has lost the status: it was still writing
            return await call.code(), {str(name): value for name, value in await call.trailing_metadata()}


# ---- Whatever ends a call ----

ENDS: dict[str, Exception | None] = {
    "OK": None,
    "abort": None,
    "code": None,
    "INVALID_ARGUMENT": BadInputError("field: wrong"),
    "INTERNAL": ReaderFailedError(),
    "PERMISSION_DENIED": NotAllowedError(Reason.ROLE, "no"),
    "UNAUTHENTICATED": NotAllowedError(Reason.MISSING, "no"),
    "UNKNOWN": RuntimeError("nobody foresaw it"),
}


class Ending:
    """Ends every call of a service in one way."""

    def __init__(self, service: ServiceDescriptor, end: str) -> None:
        self._service, self._end = service, end

    def __getattr__(self, name: str) -> Any:
        method = self._service.methods_by_name[name]
        return self._many if method.server_streaming else self._one

    async def _one(self, _request: Any, context: Any) -> bytes:
        error = ENDS[self._end]
        if error is not None:
            raise error
        if self._end == "abort":
            await context.abort(grpc.StatusCode.NOT_FOUND, "name: unknown")
        if self._end == "code":
            await abort_with_code(context, grpc.StatusCode.NOT_FOUND, "name: unknown", "the_reason")
        return b""

    async def _many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        yield await self._one(request, context)


@asynccontextmanager
async def served(
    service: ServiceDescriptor, servicer: object, doorkeeper: Doorkeeper | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_servicer(service, servicer, server, doorkeeper)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.mark.parametrize("end", ENDS)
@CALLS
async def test_a_status_says_that_it_is_the_service_s_however_the_call_ended(
    method: MethodDescriptor, end: str
) -> None:
    service = method.containing_service
    async with served(service, Ending(service, end)) as channel:
        code, said = await status_of(channel, method, [b""])
    assert code.name == (end if end.isupper() else "NOT_FOUND")
    assert said.get(ANSWERED) == "1"
    assert said.get(ERROR_CODE) == ("the_reason" if end == "code" else None)


@CALLS
async def test_so_does_one_that_was_given_before_the_call_was_served(
    method: MethodDescriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = method.containing_service
    async with served(service, Ending(service, "OK"), Doorkeeper(0)) as channel:
        code, said = await status_of(channel, method, [b""])
        assert (code, said.get(ANSWERED)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1")
    monkeypatch.setattr(strict, "FIRST_MESSAGE_S", 0.01)
    async with served(service, Ending(service, "OK")) as channel:
        start: Any = channel.stream_stream(f"/{service.full_name}/{method.name}")
        call = start()
        with pytest.raises(grpc.aio.AioRpcError) as silent:
            await call.read()
        assert silent.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(silent.value.trailing_metadata() or ())[ANSWERED] == "1"


def test_no_service_gives_a_status_metadata_of_its_own() -> None:
    """What is given to `abort` comes in the place of what says that the service has answered."""
    for path in sorted((ROOT / "services").glob("**/*.py")):
        if path.relative_to(ROOT).as_posix() == "services/rpc/strict.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            assert name not in {"set_trailing_metadata", "abort_with_status"}, f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "abort":
                assert len([*node.args, *node.keywords]) <= 2, f"{path}:{node.lineno}: use abort_with_code"


# ---- What the services say ----

INPUTS = {"nothing": [], "an empty message": [b""], "garbage": [b"\xff" * 40], "half a text": [b"\x0a\x02\xed\xa0"]}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("service", [QUEUE, FILES, HEALTH], ids=lambda service: service.name)
async def test_the_queue_says_so_whatever_it_is_sent(service: ServiceDescriptor, given: str, tmp_path: Path) -> None:
    keyfile = Keyfile(tmp_path / "keys.toml")
    keyfile.write()
    for keys in (None, keyfile.path):
        async with serving(Telemetry(None), MemoryStore(), keys) as peer:
            for method in service.methods:
                if method.full_name == "grpc.health.v1.Health.Watch" and given != "garbage":
                    continue  # it goes on until the service ends
                code, said = await status_of(peer.channel, method, INPUTS[given])
                assert said.get(ANSWERED) == "1", (method.full_name, code)
                if keys is not None and service is not HEALTH:
                    assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("given", INPUTS)
async def test_the_scheduler_says_so_whatever_it_is_sent(given: str) -> None:
    async with served(SCHEDULER, SchedulerServicer(Shell().runner)) as channel:
        for method in SCHEDULER.methods:
            code, said = await status_of(channel, method, INPUTS[given])
            assert said.get(ANSWERED) == "1", (method.full_name, code)


WATERMARK_BYTES = 256 * 1024 * 1024
"""`--disk-free-min-bytes`, unless it is set."""


def fail(_writes: Sequence[Write]) -> None:
    raise StoreError("no medium")


@asynccontextmanager
async def unable(why: str, tmp_path: Path) -> AsyncIterator[tuple[Peer, str]]:
    """Serve a queue that cannot take more than one request, for one of several reasons; also give who may ask."""
    keyfile = Keyfile(tmp_path / "keys.toml", head="[tenants.t]\nmax_waiting_requests = 1\n\n")
    key = keyfile.put("k", 'role = "client"\ntenant = "t"')
    keyfile.write()
    store = MemoryStore(WATERMARK_BYTES - 1) if why == DISK_FULL else MemoryStore()
    async with serving(Telemetry(None), store, keyfile.path) as peer:
        with ExitStack() as failing:
            if why == STORE_UNAVAILABLE:
                failing.enter_context(patch.object(store, "write", fail))
            yield peer, key


STATUS_OF = {
    DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    OVER_QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LARGER_THAN_QUOTA: grpc.StatusCode.INVALID_ARGUMENT,
}


@pytest.mark.parametrize("why", STATUS_OF)
async def test_a_call_that_stores_says_which_of_several_reasons_it_was(why: str, tmp_path: Path) -> None:
    few = queue_pb2.SubmitUnaryRequest(requests=[text()])
    many = queue_pb2.SubmitUnaryRequest(requests=[text(), text()])
    create = files_pb2.CreateFileRequest(file_id="f", filename="f", purpose="p").SerializeToString()
    append = files_pb2.AppendFileRequest(file_id="f", data=b"x").SerializeToString()
    async with unable(why, tmp_path) as (peer, key):
        header = ("authorization", f"Bearer {key}")
        if why == OVER_QUOTA:
            await peer.stub.SubmitUnary(few, metadata=[header])
        submit = many if why == LARGER_THAN_QUOTA else few
        calls = [(QUEUE.methods_by_name["SubmitUnary"], submit.SerializeToString())]
        if why == STORE_UNAVAILABLE:
            calls.append((FILES.methods_by_name["CreateFile"], create))
        if why == DISK_FULL:  # which has room for a file as long as it is empty
            await status_of(peer.channel, FILES.methods_by_name["CreateFile"], [create], header)
            calls.append((FILES.methods_by_name["AppendFile"], append))
        for method, message in calls:
            code, said = await status_of(peer.channel, method, [message], header)
            assert (code, said.get(ERROR_CODE), said.get(ANSWERED)) == (STATUS_OF[why], why, "1"), method.name


@pytest.mark.parametrize("code", STATUS_OF)
def test_the_codes_are_documented(code: str) -> None:
    assert f"| `{code}` | `{STATUS_OF[code].name}`" in (ROOT / "docs" / "protocol.md").read_text()
