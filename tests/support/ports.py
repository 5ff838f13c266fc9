"""Ports for services under test: below the system's own range, and of this process alone."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

BLOCK = 250
"""Ports that a process takes at once: it seldom needs a second block, and a claim is one descriptor."""

BLOCKS = 48
"""48 x 250 = 12,000 ports: some ten test runs side by side with two processes each find blocks of their own."""

_claims: list[socket.socket] = []
"""What keeps the blocks of this process its own: the system lets go of them with the process, however it ends."""


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody else takes while a service that has it is down.

    No other process that asks here is given it: it could otherwise draw the same one before the first of the two
    services listens. And it is below the range from which the system takes the ports of outgoing connections (Linux),
    any of which could be sitting on it when the service starts again.
    """
    return next(port for port in _drawn() if _unbound(port))


def free_ports(count: int) -> int:
    """Return the first of `count` successive ports, each as `free_port` gives them; `count` is at most `BLOCK`."""
    assert count <= BLOCK
    while True:
        first = next(_drawn())
        ports = [first, *(next(_drawn()) for _ in range(count - 1))]
        if ports == list(range(first, first + count)) and all(map(_unbound, ports)):
            return first


@cache
def _drawn() -> Iterator[int]:
    """Return what draws the ports of this process: each of its blocks in order, then a new block."""
    return (port for first in _blocks() for port in range(first, first + BLOCK))


def _blocks() -> Iterator[int]:
    """Yield the first port of one block after another, each claimed for this process; raises RuntimeError at the end.

    They come in an order of chance: a run that follows another does not meet the ports that have just been closed.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = max(first_ephemeral - BLOCKS * BLOCK, 1024)
    firsts = range(lowest, first_ephemeral - BLOCK + 1, BLOCK)
    for first in random.SystemRandom().sample(firsts, len(firsts)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0penstock-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        yield first
    raise RuntimeError(f"no ports are left: processes under test have all {len(firsts)} blocks of {BLOCK}")


def _unbound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
