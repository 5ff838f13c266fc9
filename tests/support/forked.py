"""The command in a process of its own, forked from one that has imported it: a test pays for no imports."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from typing import IO

FORKER = """
import json, os, resource, socket, sys
import typer.rich_utils  # what it imports to complain
from penstock.cli import batch_fleet
from penstock.cli.main import main

batch_fleet.SUMMARY_TRIES_S = 0.0  # a scheduler that is away does not come meanwhile
assert len(os.listdir("/proc/self/task")) == 1, "what is forked would lack a thread"
asks = socket.socket(fileno=int(sys.argv[1]))
while True:
    ask, ends, _, _ = socket.recv_fds(asks, 1, 5)
    if not ask:
        sys.exit()
    waits = os.fork()
    if not waits:
        break
    for end in ends:
        os.close(end)
    while os.waitpid(-1, os.WNOHANG) != (0, 0):
        pass  # those who have told a status

asks.close()
*standard, status, ask = ends
command = os.fork()
if command:
    for end in standard:
        os.close(end)
    os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))
    os._exit(0)
for number, end in enumerate(standard):
    os.dup2(end, number)
with open(ask) as file:
    asked = json.load(file)
for end in (*standard, status):
    os.close(end)
os.chdir(asked["directory"])
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = ["penstock", *asked["arguments"]]
if asked["largest_file_bytes"] is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, [asked["largest_file_bytes"]] * 2)
main()
"""
"""For each ask it forks one who forks the command, waits for its end and tells the status."""


@cache
def _forker() -> socket.socket:
    """Return where the process listens that forks; it ends with this one."""
    asks, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", FORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()])

    def end() -> None:
        asks.close()
        process.wait()

    atexit.register(end)
    return asks


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb"), os.fdopen(writer, "wb")


def _write(end: IO[bytes], content: bytes) -> None:
    with suppress(BrokenPipeError), end:
        end.write(content)


async def _read(end: IO[bytes]) -> bytes:
    with end:
        return await asyncio.to_thread(end.read)


async def run_forked(
    arguments: list[str], stdin: bytes | None, largest_file_bytes: int | None
) -> tuple[int, bytes, bytes]:
    """Run `penstock ARGUMENTS` from here; return its status, as `subprocess` tells it, and what it wrote."""
    ask = {
        "arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ),
        "largest_file_bytes": largest_file_bytes,
    }  # fmt: skip
    forker = await asyncio.to_thread(_forker)
    (given, into), (out, theirs_out), (err, theirs_err), (status, theirs_status) = (_pipe() for _ in range(4))
    with given, theirs_out, theirs_err, theirs_status, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(ask).encode())
        asked.seek(0)
        ends = (given, theirs_out, theirs_err, theirs_status, asked)
        socket.send_fds(forker, [b"."], [end.fileno() for end in ends])
    writing = asyncio.create_task(asyncio.to_thread(_write, into, stdin or b""))
    told, complained, ended = await asyncio.gather(_read(out), _read(err), _read(status))
    await writing
    return int(ended), told, complained
