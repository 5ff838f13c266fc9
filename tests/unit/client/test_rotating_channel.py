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
from penstock.credentials import Credentials
from penstock.dev_ca import Authority
from penstock.tls import TlsFiles, open_channel
from tests.support.ports import free_port
from tests.support.waiting import wait_for_async


class Rotation:
    """A channel to a service that says everything back, and a certificate that can be replaced."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._begin()
        self.made: WeakSet[grpc.aio.Channel] = WeakSet()
        """Those of gRPC's channels that there still are."""
        make = grpc.aio.secure_channel

        def noted(*arguments: Any, **named: Any) -> grpc.aio.Channel:
            made = make(*arguments, **named)
            self.made.add(made)
            return made

        monkeypatch.setattr(grpc.aio, "secure_channel", noted)
        self.replace()

    def _begin(self) -> None:
        self._authority = Authority.open(self._directory)
        self._host = self._authority.issue(self._directory, "service", 1, ["localhost", "127.0.0.1"])

    def replace_ca(self) -> None:
        """Write another CA, and certificates that it has signed."""
        for name in ("ca.pem", "ca-key.pem"):
            (self._directory / name).unlink()
        self._begin()
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
    async def service(self, port: int = 0) -> AsyncIterator[str]:
        """Have the service, with the present certificates; its address."""
        cert, key = self._host
        server = grpc.aio.server()
        echo: Any = grpc.stream_stream_rpc_method_handler(_say_back)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Say": echo}),))
        pair, ca = (key.read_bytes(), cert.read_bytes()), (self._directory / "ca.pem").read_bytes()
        port = server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair], ca, True))
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(0)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async with self.service() as address, open_channel(address, CHANNEL_OPTIONS, self.replace()) as channel:
            yield channel


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


async def test_who_waits_for_a_peer_that_is_down_follows_a_new_ca(rotation: Rotation) -> None:
    port = free_port()
    async with open_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS, rotation.replace(), Credentials()) as channel:
        waiting = asyncio.create_task(channel.channel_ready())

        async def fails() -> bool:
            return channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

        await wait_for_async(fails, "a connection that is refused")
        rotation.replace_ca()
        async with rotation.service(port):
            await asyncio.wait_for(waiting, 20)
            await rotation.has_channels(1)
            assert await said(channel, b"again") == b"again"


async def test_whoever_is_not_waiting_any_more_leaves_nothing_behind(rotation: Rotation) -> None:
    channel = open_channel(f"127.0.0.1:{free_port()}", CHANNEL_OPTIONS, rotation.replace())
    waiting = asyncio.create_task(channel.channel_ready())
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    assert waiting in before
    waiting.cancel()
    await asyncio.wait(before - {asyncio.current_task()}, timeout=20)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await channel.close()
