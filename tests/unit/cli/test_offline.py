"""The tools for a store that no queue uses: a signal to the command ends them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.storage.rocksdb_store import RocksdbStore

F_SETPIPE_SZ = 1031
VIOLATIONS = 2_000
"""Far more than a pipe of a page and the writer's own buffer hold."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_ends_the_work(tmp_path: Path, number: signal.Signals) -> None:
    store = RocksdbStore(tmp_path / "data")
    store.write([Write(r.PAYLOADS, r.seq_key(seq), b"of no request") for seq in range(VIOLATIONS)])
    store.close()
    out, into = os.pipe()
    fcntl.fcntl(into, F_SETPIPE_SZ, 4096)
    # As in a terminal: a shell lets what it starts in the background ignore SIGINT, and nohup SIGHUP.
    command = ["env", "--default-signal", sys.executable, "-m", "penstock", "verify-store", str(tmp_path / "data")]
    ran = subprocess.Popen(command, stdout=into, stderr=subprocess.PIPE, text=True)
    os.close(into)
    with os.fdopen(out, "rb") as told:
        assert told.read(1), "it is at work, and cannot go on for want of a reader"
        ran.send_signal(number)
        rest = told.read()  # until nobody is left who writes
    assert (ran.communicate()[1], ran.returncode) == ("", 130)
    assert rest.count(b"\n") < VIOLATIONS
