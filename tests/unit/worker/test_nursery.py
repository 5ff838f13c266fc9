"""What a forked process does with what it has inherited."""

from __future__ import annotations

import os
import subprocess
import sys

from services.worker.nursery import Nursery

GARBAGE = """
import gc, os
from services.worker.nursery import Nursery

class Ours:
    '''What only the process that made it can end, as gRPC's and RocksDB's objects.'''
    def __init__(self):
        self.made_in = os.getpid()
        self.itself = self
    def __del__(self):
        if os.getpid() != self.made_in:
            os.abort()

def work(end, counter):
    end.sendall(b"alive")

def leave_garbage():
    gc.collect()
    Ours()

os.register_at_fork(before=leave_garbage, after_in_child=lambda: [[i] for i in range(10_000)])
nursery = Nursery.fork(work)
child = nursery.first()
assert child.socket.recv(100) == b"alive"
assert gc.isenabled()
nursery.close()
gc.disable()
nursery = Nursery.fork(lambda end, counter: end.sendall(str(gc.isenabled()).encode()))
assert nursery.first().socket.recv(100) == b"True", "what it makes itself is collected"
assert not gc.isenabled()
"""


def test_garbage_of_the_worker_is_not_ended_by_what_it_forks() -> None:
    ran = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_it_forks_no_more_once_it_has_ended() -> None:
    nursery = Nursery.fork(lambda end, counter: None)
    nursery.close()
    assert not os.path.exists(f"/proc/{nursery.pid}")
