"""Channels of certificates that were replaced: each lives as long as the calls over it, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc
import pytest

from penstock.connection import CHANNEL_OPTIONS
from penstock.dev_ca import Authority
from penstock.tls import TlsFiles, open_channel
from tests.support.waiting import wait_for_async


class Rotation:
    """A channel to a service that says everything back, and a certificate that can be replaced."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._authority = directory, Authority.open(directory)
        self._host = self._authority.issue(directory, "service", 1, ["localhost", "127.0.0.1"])
        self.made: WeakSet[grpc.aio.Channel] = WeakSet()
        """Those of gRPC's channels that there still are."""
        make = grpc.aio.secure_channel

        def noted(*arguments: Any, **named: Any) -> grpc.aio.Channel:
            made = make(*arguments, **named)
            self.made.add(made)
            return made

        monkeypatch.setattr(grpc.aio, "secure_channel", noted)
        self.replace()

    def replace(self) -> TlsFiles:
        """Write another certificate."""
        cert, key = self._authority.issue(self._directory, "client", 1, None)
        return TlsFiles(str(self._directory / "ca.pem"), str(cert), str(key))

    async def has_channels(self, count: int) -> None:
        """Wait until there are so many of gRPC's channels."""

        async def fact() -> bool:
            return len(self.made) == count

        await wait_for_async(fact, f"{count} channels")

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        cert, key = self._host
        server = grpc.aio.server()
        echo: Any = grpc.stream_stream_rpc_method_handler(_say_back)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Say": echo}),))
        pair, ca = (key.read_bytes(), cert.read_bytes()), (self._directory / "ca.pem").read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], ca, True))
        await server.start()
        async with open_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS, self.replace()) as channel:
            yield channel
        await server.stop(0)


async def _say_back(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


def say(channel: grpc.aio.Channel) -> Any:
    """Begin a call."""
    return channel.stream_stream("/echo/Say")(wait_for_ready=True)


async def said(channel: grpc.aio.Channel, text: bytes) -> bytes:
    """Say something in a call of its own; return the answer."""
    call = say(channel)
    await call.write(text)
    await call.done_writing()
    answers = [answer async for answer in call]
    return b"".join(answers)


@pytest.fixture
def rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rotation:
    return Rotation(tmp_path, monkeypatch)


async def test_no_channel_is_left_of_certificates_that_were_replaced(rotation: Rotation) -> None:
    async with rotation.channel() as channel:
        for number in range(10):
            rotation.replace()
            assert await said(channel, b"%d" % number) == b"%d" % number
        await rotation.has_channels(1)


async def test_a_call_goes_on_over_the_channel_that_it_began_with(rotation: Rotation) -> None:
    async with rotation.channel() as channel:
        call = say(channel)
        await call.write(b"before")
        assert await call.read() == b"before"
        for _ in range(3):
            rotation.replace()
            await said(channel, b"of another")
        await rotation.has_channels(2)
        await call.write(b"after")
        assert await call.read() == b"after"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        del call
        await rotation.has_channels(1)


async def test_calls_of_replaced_certificates_end_when_the_channel_is_closed(rotation: Rotation) -> None:
    async with rotation.channel() as channel:
        call = say(channel)
        await call.write(b"before")
        assert await call.read() == b"before"
        rotation.replace()
        await said(channel, b"of another")
    with pytest.raises(asyncio.CancelledError):
        await call.read()
