"""The ports of services under test: no two processes are given one, and none is of the system's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.fleet import ROOT
from tests.support.ports import BLOCK, free_port, free_ports

ASK = """
import random
random.SystemRandom.sample = lambda self, population, k: population  # the worst luck: all begin with one block
from tests.support.ports import BLOCK, free_port
print(*(free_port() for _ in range(2 * BLOCK)), flush=True)
input()
"""


def test_processes_side_by_side_never_share_a_port() -> None:
    command, pipe = [sys.executable, "-c", ASK], subprocess.PIPE
    asking = [subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) for _ in range(3)]
    given = [free_port() for _ in range(5)]
    for one in asking:
        assert one.stdout is not None
        given += map(int, one.stdout.readline().split())
    for one in asking:
        one.communicate("\n")
    assert len(given) == len(set(given)) == 5 + 6 * BLOCK
    assert max(given) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_successive_ports_lie_in_one_block() -> None:
    firsts = [free_ports(100) for _ in range(5)]
    taken = sorted(port for first in firsts for port in range(first, first + 100))
    assert len(set(taken)) == 500
    assert free_port() not in taken
