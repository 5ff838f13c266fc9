"""The worker and its child processes: who dies with whom, and who computes first."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""`prctl` option: signal the caller when the thread that forked it ends (Linux)."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children_die_with_us() -> None:
    """Make every process forked from now on die with its parent; call it in the main thread, which lives longest.

    An engine core would otherwise outlive a killed worker and keep its memory.
    Spawned processes do not inherit this; `guard_process_group` is for them.
    """
    os.register_at_fork(after_in_child=_leave_and_die_with_parent)


def _leave_and_die_with_parent() -> None:
    die_with_parent()
    # Ctrl-C goes to a whole process group; the engine must go on while the worker drains.
    os.setpgid(0, 0)


def how_ended(status: int) -> str:
    """Return how a process ended whose exit status is this, or below 0 if a signal ended it."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


USUAL_STACK_BYTES = 8 * 1024 * 1024
"""Where the worker's stack has no bound: the one that Linux sets by itself."""

STACK_SHARE = 0.75
"""Of the worker's stack for who tries out what the worker is then to survive: more is left there, whatever it had taken
before. The bounds of structured outputs leave half of it unused (`services/worker/vllm/depth.py`)."""


def have_less_stack() -> None:
    """Let the stack of this process' main thread grow less far than that of the worker's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    whole = USUAL_STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (int(whole * STACK_SHARE), hard))


BEHIND_THE_ENGINE = 5
"""Niceness of what runs beside an engine that computes on the same cores: a third of the engine's share where the two
compete (nice 0 weighs 1,024, nice 5 weighs 335; sched(7)). Its steps are what everybody waits for."""


def yield_to_engine() -> None:
    """Let an engine that computes on this machine's cores go first; the threads and children that follow inherit it."""
    for thread in os.listdir("/proc/self/task"):
        # A sandbox may forbid it, and a thread may have ended meanwhile.
        with suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, int(thread)) + BEHIND_THE_ENGINE
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
            # Whoever wakes up in this class does not interrupt what runs (sched(7)).
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def guard_process_group() -> None:
    """Fork a guard that kills this process group when this process dies.

    For engines that spawn (CUDA): their processes stay in the worker's group,
    which the worker leads. Call it before the engine is built.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    group = os.getpid()
    reader, writer = os.pipe()
    os.set_inheritable(writer, False)
    if os.fork() != 0:
        os.close(reader)
        # The write end stays open, unused, until this process is gone.
        return
    os.close(writer)
    # The guard must outlive its parent by a moment, to do its work.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.read(reader, 1)
    os.killpg(group, signal.SIGKILL)
    os._exit(0)
