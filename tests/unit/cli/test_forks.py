"""What is heard of gRPC itself: nothing, beside the children that a command starts and of connections that fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

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


async def test_a_service_without_tls_is_told_of_once(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["certs", str(tmp_path)]).exit_code == 0
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "PENSTOCK_"))}
    environment["PENSTOCK_TLS_CA"] = str(tmp_path / "ca.pem")
    command = [sys.executable, "-m", "penstock", "get", "any", "--queue", address]
    pipe = asyncio.subprocess.PIPE
    ran = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
    said = (await ran.communicate())[1].decode()
    await server.stop(None)
    assert ran.returncode == 69
    assert said.startswith(f"penstock: {address} does not answer in TLS (")
    assert said.count("\n") == 1
