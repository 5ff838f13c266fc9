"""A worker that is told to stop while neither peer takes what it says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.request.v1 import request_pb2 as pb
from tests.support.fake_peers import Peers, until
from tests.support.fleet import Service
from tests.support.modules import python_path
from tests.support.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

GRACE_S = 0.2

END_S = 2
"""What docs/configuration.md says that whoever follows SIGTERM with SIGKILL must wait beyond the grace."""


def held_up_s(*pids: int) -> float:
    """How long these processes have been ready to run, and something else had the cores."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9


async def test_peers_that_do_not_answer_do_not_hold_up_its_end(tmp_path: Path) -> None:
    peers, address = Peers(), f"127.0.0.1:{free_port()}"
    await peers.start()
    command = [sys.executable, "-m", "services.worker", "--listen", address, "--engine", "simulated"]
    command += ["--queue-address", f"127.0.0.1:{peers.queue_port}", "--shutdown-grace-s", str(GRACE_S)]
    command += ["--scheduler-address", f"127.0.0.1:{peers.scheduler_port}"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    service = Service("worker", command, environment, tmp_path / "worker.log", address, "")
    service.start(wait=False)
    try:
        await until(lambda: peers.scheduler.opens and peers.queue.opens, "both opens")
        peers.queue.recording = False
        request = pb.Request(request_id="r1", channel="batch", text="x", sampling=pb.SamplingParams(max_tokens=8))
        peers.scheduler.grant(peers.queue.add(request), blocks=10)
        await until(lambda: peers.queue.result("r1"), "the result")
        peers.scheduler.listens.clear()
        pids = service.pid, os.getpid()
        began_s, held_up_before_s = time.monotonic(), held_up_s(*pids)
        held_up_then_s = 0.0

        def ended() -> bool:
            nonlocal held_up_then_s
            held_up_then_s = held_up_s(*pids)
            return not service.running

        service.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        await until(ended, "the exit")
        took_s = time.monotonic() - began_s
        assert took_s - (held_up_then_s - held_up_before_s) < GRACE_S + END_S, "not counting what others had the cores"
        assert service.process.returncode == 0  # type: ignore[union-attr]
        assert "1 requests have ended here and the queue has not recorded it" in service.log()
    finally:
        if service.running:
            service.kill()
        await peers.close()
