"""A worker whose tokenizer hangs in its load: it is never ready, and ends, by itself or when it is told to."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_peers import Peers, until
from tests.support.fleet import Service, alive, descendants
from tests.support.modules import python_path
from tests.support.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

NEVER_LOADS = """
import os, signal
from services.worker.__main__ import main
from services.worker.simulated.engine import ByteRenderer

worker, usual = os.getpid(), ByteRenderer.__init__

def load(self, *arguments):
    if os.getpid() != worker:
        os.kill(os.getpid(), signal.SIGSTOP)
    usual(self, *arguments)

ByteRenderer.__init__ = load
main()
"""
"""Stopped, as one whose files lie on a network drive that does not answer."""


@asynccontextmanager
async def loading(directory: Path, stall_s: str) -> AsyncIterator[tuple[Service, Peers]]:
    """Have a worker that loads, and peers that it does not ask for anything."""
    peers, address = Peers(), f"127.0.0.1:{free_port()}"
    await peers.start()
    command = [sys.executable, "-c", NEVER_LOADS, "--listen", address, "--engine", "simulated"]
    command += ["--queue-address", f"127.0.0.1:{peers.queue_port}"]
    command += ["--scheduler-address", f"127.0.0.1:{peers.scheduler_port}", "--engine-stall-s", stall_s]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    service = Service("worker", command, environment, directory / "worker.log", address, "")
    service.start(wait=False)
    try:
        yield service, peers
    finally:
        if service.running:
            service.kill()
        await peers.close()
    assert "ready:" not in service.log()
    assert not peers.scheduler.opens
    assert not peers.queue.opens


async def test_it_ends_by_itself_when_that_takes_too_long(tmp_path: Path) -> None:
    async with loading(tmp_path, "1") as (service, _):
        await until(lambda: not service.running, "the exit")
        assert service.wait_exit() == 70, service.log()
        assert "a tokenizer process has not loaded within 1 s" in service.log()


async def test_it_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    async with loading(tmp_path, "0") as (service, _):
        address = ("127.0.0.1", int(service.address.rpartition(":")[2]))
        await until(lambda: _listens(address) or not service.running, "its port")
        family = descendants(service.pid)
        assert service.stop() == 0, service.log()
        await until(lambda: not any(alive(pid) for pid in family), "the end of its processes")


def _listens(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0
