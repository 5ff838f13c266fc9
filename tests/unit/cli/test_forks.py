"""gRPC beside the children that a command starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKS = """
import asyncio, os
import penstock.cli.main
import grpc

async def fork_beside_grpc():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        for _ in range(5):
            child = await asyncio.create_subprocess_exec(
                "sh", "-c", "echo ${GRPC_ENABLE_FORK_SUPPORT-unset}", preexec_fn=lambda: None
            )
            assert await child.wait() == 0

asyncio.run(fork_beside_grpc())
"""
"""Starts children as the supervisor does, in a process that speaks gRPC."""


@pytest.mark.parametrize("named", [None, "0"])
def test_a_child_is_started_without_a_word_of_grpcs(named: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if named is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = named
    ran = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert set(ran.stdout.split()) == {named or "unset"}, "the children choose for themselves"
