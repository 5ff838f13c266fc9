"""A process that forks others when it is asked to, for as long as the worker lives.

The worker itself cannot fork once its engine and gRPC run: a fork has one thread, and finds locks that others hold. The
nursery is forked before either, when everything is imported, and loads nothing: what it forks is as good as the first.
It dies with the worker, and what it has forked with it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn, TypeAlias

from services.worker.processes import die_with_parent, how_ended

ASK = struct.Struct("!q")
"""To the nursery: the process to be ended first, 0 for none. With it come the new one's socket and counter."""

ANSWER = struct.Struct("!qq")
"""From the nursery: the new process, and the status with which the old one ended."""

COUNTER_BYTES = 16
"""Two numbers of 64 bits: how many prompts were begun, and whether the form of the last is being looked at."""

END_LOOKS = 5000
LOOK_S = 0.001
"""How often, and how far apart, an old process is looked at that is to end before the new one is there: one that hangs
in the kernel (on a network drive that does not answer) ends when it likes, and others wait for their successors."""

NO_END = -1
"""In the place of the status of a process that has not ended: what it is when it does end nobody asks any more."""

log = logging.getLogger("worker.nursery")


class NurseryGoneError(Exception):
    """Nothing can be forked any more."""


Work: TypeAlias = Callable[[socket.socket, memoryview], None]
"""What a child does, with its end of the socket and the counter; it ends when it returns."""


class Child(NamedTuple):
    """A process that the nursery has forked."""

    pid: int
    socket: socket.socket
    """The worker's end."""
    counter: memoryview
    """Two numbers in memory that the process shares: what it wrote is there when it has died."""


class Nursery:
    """The worker's side of the nursery."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        """Talk to the process `pid` over `control`."""
        self._pid = pid
        self._control = control
        self._turn = asyncio.Lock()

    @classmethod
    def fork(cls, work: Work) -> Nursery:
        """Fork the nursery; its children do `work`. Call it with no event loop and no other thread running."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _fork_without_collecting()
        if pid == 0:
            ours.close()
            _run(lambda: _serve(theirs, work))
        theirs.close()
        return cls(pid, ours)

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._pid

    def first(self) -> Child:
        """Return a new child, before the event loop runs. Raises NurseryGoneError."""
        try:
            ours, counter = self._ask(0)
            pid, _ = _read_answer(self._control.recv(ANSWER.size))
        except OSError as error:
            raise NurseryGoneError(str(error)) from error
        return Child(pid, ours, counter)

    async def successor(self, child: Child) -> tuple[Child, str]:
        """End `child` unless it has ended; return a new one and how that one ended. Raises NurseryGoneError."""
        async with self._turn:
            self._control.setblocking(False)
            try:
                ours, counter = self._ask(child.pid)
                answer = await asyncio.get_running_loop().sock_recv(self._control, ANSWER.size)
            except OSError as error:
                raise NurseryGoneError(str(error)) from error
            pid, status = _read_answer(answer)
        return Child(pid, ours, counter), _how(status)

    def _ask(self, old: int) -> tuple[socket.socket, memoryview]:
        """Send what a new child needs; return the worker's part of it."""
        ours, theirs = socket.socketpair()
        shared = os.memfd_create("penstock-counter")
        try:
            os.ftruncate(shared, COUNTER_BYTES)
            socket.send_fds(self._control, [ASK.pack(old)], [theirs.fileno(), shared])
            return ours, _counter(shared)
        finally:
            theirs.close()
            os.close(shared)

    def close(self) -> None:
        """End the nursery, and with it its children."""
        self._control.close()
        end_process(self._pid)


def _fork_without_collecting() -> int:
    """Fork; the child collects no garbage until `_run` has set aside what is not its own.

    What others have registered to run after a fork makes objects, and so may start a collection before any of our own
    code runs.
    """
    collecting = gc.isenabled()
    gc.disable()
    pid = -1
    try:
        pid = os.fork()
        return pid
    finally:
        if pid != 0 and collecting:
            gc.enable()


def end_process(pid: int) -> int:
    """Kill a child and return its status, 0 if that has been taken already."""
    try:
        os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]
    except (ProcessLookupError, ChildProcessError):
        return 0


def _end_if_it_does(pid: int) -> int:
    """Kill a child and return its status, NO_END if it does not end in time."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for _ in range(END_LOOKS):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(LOOK_S)
    return NO_END


def _how(status: int) -> str:
    """Return how a process ended, by its status."""
    if status == NO_END:
        return "which SIGKILL does not end"
    return how_ended(os.waitstatus_to_exitcode(status))


def _counter(shared: int) -> memoryview:
    return memoryview(mmap.mmap(shared, COUNTER_BYTES)).cast("Q")


def _read_answer(answer: bytes) -> tuple[int, int]:
    """Return the new process and the old one's status. Raises NurseryGoneError for the end of the stream."""
    if not answer:
        raise NurseryGoneError("it has ended")
    pid, status = ANSWER.unpack(answer)
    return pid, status


def _run(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, and end it."""
    status = 0
    # What was inherited is the parent's, and in the state in which its other threads left it: to look at it for garbage
    # would copy its memory, run its finalizers, or fail.
    gc.freeze()
    gc.enable()
    try:
        die_with_parent()
        # Ctrl-C reaches the whole group; the worker still needs answers while it drains.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        work()
    except ConnectionError as error:
        # The worker ended while it was told something: what it had to say it has said itself.
        log.debug("process %d has nobody to work for: %s", os.getpid(), error)
        status = 1
    except BaseException:
        log.exception("process %d failed", os.getpid())
        status = 1
    finally:
        os._exit(status)


def _begin(work: Work, end: int, shared: int) -> None:
    work(socket.socket(fileno=end), _counter(shared))


def _serve(control: socket.socket, work: Work) -> None:
    """Fork a child for each ask, until the worker closes the socket."""
    while True:
        ask, ends, _, _ = socket.recv_fds(control, ASK.size, 2)
        if not ask:
            return
        (old,) = ASK.unpack(ask)
        status = _end_if_it_does(old) if old else 0
        pid = _fork_without_collecting()
        if pid == 0:
            control.close()
            _run(partial(_begin, work, *ends))
        for end in ends:
            os.close(end)
        control.send(ANSWER.pack(pid, status))
