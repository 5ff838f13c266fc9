"""What a call was sent is let go of with it, by reference counting: a collection may be a long way off."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from services.auth.keyring import NotAllowedError, Reason
from services.rpc.reading import reading
from services.rpc.strict import BadInputError, add_servicer
from tests.support.fake_peers import until

SERVICE = pb.DESCRIPTOR.services_by_name["QueueService"]

LARGE = request_pb2.Request(text="x" * 4 * 1024 * 1024)
CALLS = 40

LAST = 2
"""Calls that gRPC's loop names until others come."""

ENDED = [
    ("Delete", pb.DeleteRequest(batch="x" * 512), grpc.StatusCode.OK),
    ("SubmitUnary", pb.SubmitUnaryRequest(requests=[LARGE]), grpc.StatusCode.INVALID_ARGUMENT),
    (
        "Submit",
        pb.SubmitRequest(batch=pb.SubmitBatch(requests=[pb.TaggedRequest(request=LARGE)])),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    ("Get", pb.GetRequest(request_id="x"), grpc.StatusCode.NOT_FOUND),
    ("Cancel", pb.CancelRequest(batch="x"), grpc.StatusCode.PERMISSION_DENIED),
    ("Watch", pb.WatchRequest(batch="x"), grpc.StatusCode.INVALID_ARGUMENT),
]


class Witness:
    """Lives as long as the frame of a servicer, and with it the message."""


class Servicer:
    """Ends calls in every way there is."""

    def __init__(self) -> None:
        self.witnesses: weakref.WeakSet[Witness] = weakref.WeakSet()
        self.called = 0

    def _witness(self) -> Witness:
        self.called += 1
        witness = Witness()
        self.witnesses.add(witness)
        return witness

    def __getattr__(self, name: str) -> Any:
        """Stand for the methods that nobody calls here."""
        return None

    async def Delete(self, request: Any, _context: Any) -> pb.DeleteResponse:
        witness = self._witness()
        return pb.DeleteResponse(deleted=len(f"{witness}{request}"))

    async def SubmitUnary(self, request: Any, _context: Any) -> None:
        witness = self._witness()
        raise BadInputError(f"{type(witness).__name__} of {len(request.requests)}: wrong")

    async def Get(self, request: Any, context: Any) -> None:
        witness = self._witness()
        try:
            raise LookupError(request)
        except LookupError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{type(witness).__name__}: unknown")

    async def Cancel(self, request: Any, _context: Any) -> None:
        witness = self._witness()
        raise NotAllowedError(Reason.CHANNEL, f"{type(witness).__name__} {len(request.batch)}")

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[pb.WatchResponse]:
        witness = self._witness()
        yield pb.WatchResponse()
        raise BadInputError(f"{type(witness).__name__} {len(request.batch)}: wrong")

    async def Submit(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[pb.SubmitResponse]:
        async with reading(self._read(requests)) as reader:
            yield pb.SubmitResponse()
            await reader

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            witness = self._witness()
            raise BadInputError(f"{type(witness).__name__} of {message.WhichOneof('message')}: wrong")


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 2 * LARGE.ByteSize())])
    add_servicer(SERVICE, servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def alive(kind: str) -> list[Any]:
    """Return the objects of a type of gRPC's that there are: one that nobody can name otherwise."""
    return [each for each in gc.get_objects() if type(each).__name__ == kind]


def holders(of: object) -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_referrers(of))


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(("method", "message", "status"), ENDED, ids=[method for method, _, _ in ENDED])
async def test_a_call_leaves_nothing_to_the_garbage_collector(
    method: str, message: Message, status: grpc.StatusCode
) -> None:
    servicer = Servicer()
    contexts, errors = len(alive("_ServicerContext")), len(alive("AbortError"))
    async with serving(servicer) as channel:
        for _ in range(CALLS):
            start: Any = channel.stream_stream(f"/{SERVICE.full_name}/{method}")
            call = start(iter([message.SerializeToString()]))
            with suppress(grpc.aio.AioRpcError):
                async for _response in call:
                    pass
            assert await call.code() is status, await call.details()
        assert servicer.called == CALLS
        # A client may see the status of the last call a turn of the loop before its task has ended.
        await until(lambda: not servicer.witnesses or None, "all witnesses let go", timeout_s=10)
        # The context has read the message, and what reads it may hold it.
        assert len(left := alive("_ServicerContext")) <= contexts + LAST, holders(left[-1])
        # The state of a call has the error that ended it: what that error knows must not lead back to the call.
        assert len(left := alive("AbortError")) <= errors + LAST, holders(left[-1])
