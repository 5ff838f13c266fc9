"""A peer whose process is stopped: its kernel still answers, and the connection is closed all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from penstock.connection import CHANNEL_OPTIONS as OF_CLIENTS
from services.rpc.limits import CHANNEL_OPTIONS, SERVER_OPTIONS

PEER = """
import asyncio, sys, grpc

async def wait(request, context):
    await asyncio.Event().wait()

async def serve():
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"wait": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()

async def ask(address):
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.unary_unary("/s/wait")(b"")

asyncio.run(ask(sys.argv[1]) if sys.argv[1:] else serve())
"""

TIMES = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
SOONER = 20
"""The options' times are divided by this; one that is not among them is gRPC's own, which is a minute or more."""


def sooner(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, value // SOONER if name in TIMES else value) for name, value in options]


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PEER, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, OF_CLIENTS], ids=["services", "clients"])
async def test_a_call_to_a_server_that_is_stopped_ends(options: list[tuple[str, int]]) -> None:
    with peer() as process:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", sooner(options)) as channel:
            await channel.channel_ready()
            os.kill(process.pid, signal.SIGSTOP)
            wait: Any = channel.unary_unary("/s/wait")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(wait(b""), 30)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_of_a_client_that_is_stopped_ends() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(_request: bytes, _context: Any) -> bytes:
        begun.set()
        try:
            return await asyncio.Future[bytes]()
        finally:
            ended.set()

    server = grpc.aio.server(options=sooner(SERVER_OPTIONS))
    handler: Any = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"wait": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with peer(f"127.0.0.1:{port}") as process:
            async with asyncio.timeout(30):
                await begun.wait()
                os.kill(process.pid, signal.SIGSTOP)
                await ended.wait()
    finally:
        await server.stop(0)
