"""A reader that fails as nobody expected ends its stream with INTERNAL, and the log says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from penstock.scheduler.v1 import scheduler_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2_grpc
from services.rpc.reading import reading
from services.rpc.strict import BadInputError, ReaderFailedError, add_servicer

SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]


class Servicer:
    """Reads a stream beside its writer, which ends, without a complaint, when the reader does."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    async def Credits(self, requests: AsyncIterator[pb.CreditsRequest], _: Any) -> AsyncIterator[pb.CreditsResponse]:
        over = asyncio.Event()

        async def read() -> None:
            try:
                async for _ in requests:
                    if self._failure is not None:
                        raise self._failure
            finally:
                over.set()

        async with reading(read()):
            yield pb.CreditsResponse()
            await over.wait()

    Status = DrainWorker = UndrainWorker = Credits


async def ended_with(failure: Exception | None) -> tuple[grpc.StatusCode, str]:
    """Return how a call ends whose reader fails like that."""
    server = grpc.aio.server()
    add_servicer(SERVICE, Servicer(failure), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Credits(iter([pb.CreditsRequest()] * 2))
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        code, details = await call.code(), await call.details()
    await server.stop(None)
    return code, details or ""


async def test_what_nobody_expected_ends_the_stream_with_internal_and_a_stack_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code, details = await ended_with(TypeError("int object expected; got str"))
    assert code is grpc.StatusCode.INTERNAL
    assert "int object" not in details
    (record,) = [record for record in caplog.records if record.name == "rpc"]
    assert record.exc_info is not None
    assert "int object expected" in str(record.exc_info[1])


async def test_the_end_of_the_stream_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    assert (await ended_with(None))[0] is grpc.StatusCode.OK
    assert not [record for record in caplog.records if record.name == "rpc"]


async def test_bad_input_is_left_to_who_serves_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def read() -> None:
        raise BadInputError("field: wrong")

    with pytest.raises(BadInputError):
        async with reading(read()) as reader:
            await reader
    assert not [record for record in caplog.records if record.name == "rpc"]


async def test_a_reader_that_is_cancelled_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async with reading(asyncio.Event().wait()):  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name == "rpc"]


async def test_the_failure_reaches_a_writer_that_waits_for_its_reader() -> None:
    async def read() -> None:
        raise ZeroDivisionError

    with pytest.raises(ReaderFailedError):
        async with reading(read()) as reader:
            await reader
