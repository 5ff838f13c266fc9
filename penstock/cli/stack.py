"""The whole of Penstock on one machine: queue, scheduler and workers as processes of their own."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.address import MOST_PORT
from penstock.cli.config import said_to, tls_told_to, told_to
from penstock.cli.errors import CommandError
from penstock.cli.supervisor import BEHIND_ENGINES, Supervisor
from penstock.cli.tiny import write_tiny_model
from penstock.config_file import SERVICES
from penstock.exits import EX_UNAVAILABLE, EX_USAGE
from penstock.tiny_model import Shape, is_model
from penstock.tls import plain_ones

TINY_NAME = "tiny"
"""Name the tiny model is served under."""

TINY_FLAGS = {
    "--served-model-name": TINY_NAME,
    "--dtype": "float32",
    "--max-model-len": "2048",
    "--block-size": "32",
    "--num-gpu-blocks-override": "513",
    "--engine-threads": "1",
    "--enforce-eager": None,
}
"""How the tiny model is served where the user, by flag, variable or file, does not say otherwise.

512 usable blocks are eight whole windows.
"""

WORKER_SETTINGS = ("served_model_name", "engine_threads")
"""Those of TINY_FLAGS that are settings of the worker; the others are arguments of the engine."""

ARGUMENTS = "engine_arguments"
"""The worker's setting with these."""

DATA_DIR_OPTION = "DATA_DIR_OPTION"
"""Variable in which who calls the command for somebody else (`make run`) says how that one names the data directory."""

GATEWAY_OFFSET = 5
SCHEDULER_OFFSET = 10
WORKER_OFFSET = 20
"""Ports above the queue's; workers count up from theirs. From the default one on they are those where each service
listens by itself."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start."""

    data_dir: Path
    workers: int
    model: str
    engine_flags: Sequence[str]
    base_port: int
    """Port of the queue; 0 picks free ports for everything."""
    metrics_base_port: int = 0
    """Port of the queue's metrics; 0 means no metrics."""
    gateway: bool = False
    """Whether to serve OpenAI's API as well."""
    can_do_without: bool = True
    """Whether services that are up would do as well for the command, which then starts none."""
    gives_up: bool = True
    """Whether the command ends when a service that was ready cannot be started again; else that is tried for ever."""

    @property
    def services(self) -> tuple[str, ...]:
        """The kinds of services to start."""
        return tuple(name for name in SERVICES if self.gateway or name != "gateway")


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack."""

    queue: str
    scheduler: str
    workers: tuple[str, ...]
    gateway: str
    """HOST:PORT of the gateway; empty if there is none."""
    supervisor: Supervisor


@asynccontextmanager
async def running_stack(plan: StackPlan, say: Callable[[str], None]) -> AsyncIterator[Stack]:
    """Start everything, yield once it is ready, stop everything. Raises CommandError if a service does not start."""
    for problem in unfit_ports(plan):
        # The last services to be started would find it out only once the engine is loaded.
        raise problem
    if plain := plain_ones({name: tls_told_to(name) for name in plan.services}):
        say(f"note: {plain}")
    model_flags = engine_flags(plan, say)
    interrupted = False
    supervisor = Supervisor(plan.data_dir / "logs", say, way_out(plan), plan.gives_up)
    try:
        metrics = plan.metrics_base_port
        flags = ["--data-dir", str(plan.data_dir / "queue"), *_metrics(metrics, 0)]
        queue = await supervisor.ready(
            supervisor.add("queue", "services.queue", _listen(plan.base_port, 0), flags, BEHIND_ENGINES)
        )
        flags = ["--queue-address", queue, *_metrics(metrics, 1)]
        scheduler = await supervisor.ready(
            supervisor.add(
                "scheduler", "services.scheduler", _listen(plan.base_port, SCHEDULER_OFFSET), flags, BEHIND_ENGINES
            )
        )
        say(f"starting {plan.workers} worker{'s' * (plan.workers > 1)}; the engine may take a while")
        addresses = ["--queue-address", queue, "--scheduler-address", scheduler]
        services = [
            supervisor.add(
                f"worker-{number}",
                "services.worker",
                _listen(plan.base_port, WORKER_OFFSET + number - 1),
                ["--worker-id", f"worker-{number}", *addresses, *_metrics(metrics, 1 + number), *model_flags],
            )
            for number in range(1, plan.workers + 1)
        ]
        workers = await asyncio.gather(*(supervisor.ready(service) for service in services))
        gateway = ""
        if plan.gateway:
            # The last to start is the first to stop: what it has open ends while there are workers to end it.
            listen = _listen(plan.base_port, GATEWAY_OFFSET)
            gateway = await supervisor.ready(
                supervisor.add("gateway", "services.gateway", listen, addresses, BEHIND_ENGINES)
            )
        yield Stack(queue, scheduler, tuple(workers), gateway, supervisor)
    except asyncio.CancelledError:
        interrupted = True
        say(_stopping(supervisor))
        raise
    finally:
        await (supervisor.stop() if interrupted else _stop_unhurried(supervisor, say))


async def _stop_unhurried(supervisor: Supervisor, say: Callable[[str], None]) -> None:
    """Stop the services where nobody has interrupted yet: the first cancellation tells how long it takes, no more."""
    stopping = asyncio.create_task(supervisor.stop())
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        say(_stopping(supervisor))
        await stopping


def _stopping(supervisor: Supervisor) -> str:
    return f"stopping: finishing what runs, at most {supervisor.longest_stop_s:.0f} s; Ctrl-C again ends it now"


def unfit_ports(plan: StackPlan) -> Iterator[CommandError]:
    """Yield what is the matter with each port that the plan names and nobody can listen on."""
    workers = range(1, plan.workers + 1)
    metrics = ["queue", "scheduler", *(f"worker-{number}" for number in workers)]
    named = [("queue", _listen(plan.base_port, 0)), ("scheduler", _listen(plan.base_port, SCHEDULER_OFFSET))]
    named += [(f"worker-{number}", _listen(plan.base_port, WORKER_OFFSET + number - 1)) for number in workers]
    named += [("gateway", _listen(plan.base_port, GATEWAY_OFFSET))] if plan.gateway else []
    named += [
        (f"{name}'s metrics", at) for n, name in enumerate(metrics) for at in _metrics(plan.metrics_base_port, n)[1:]
    ]
    owners: dict[str, str] = {}
    for name, address in named:
        port = int(address.rpartition(":")[2])
        cannot = f"{name} cannot listen on {address}"
        if not 0 <= port <= MOST_PORT:
            yield CommandError(f"{cannot}: there is no such port", EX_USAGE)
        elif port and address in owners:
            yield CommandError(f"{cannot}: {owners[address]} does", EX_USAGE)
        elif taken := _taken(port):
            yield CommandError(f"{cannot}: {taken}\n{way_out(plan)}", EX_UNAVAILABLE)
        owners.setdefault(address, name)


def _taken(port: int) -> str:
    """Return why nothing can listen on a port of the loopback now; empty if something can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who listen do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            return "the port is in use by another process" if in_use else str(error.strerror)
    return ""


def way_out(plan: StackPlan) -> str:
    """Return what to do when a data directory or a port cannot be had."""
    # Who asks by way of `make run` gives the directory there.
    options = [f"{os.environ.get(DATA_DIR_OPTION, '--data-dir')} (now {plan.data_dir})"]
    if plan.base_port:
        options.append(f"--base-port (now {plan.base_port})")
    if plan.metrics_base_port:
        options.append(f"--metrics-base-port (now {plan.metrics_base_port})")
    others = "`penstock run-batch` without --up has those answer; or " if plan.can_do_without else ""
    return f"if other services are up on this machine, {others}give these ones their own {' and '.join(options)}"


def engine_flags(plan: StackPlan, say: Callable[[str], None]) -> list[str]:
    """Return the workers' model flags; without a model, make the tiny one below the data directory and use it."""
    given = list(plan.engine_flags)
    if plan.model:
        return ["--model", plan.model, *given]
    if _value(given, "--engine") == "simulated" or _value(given, "--model"):
        return given
    directory = plan.data_dir / "tiny-model"
    if not is_model(directory):
        write_tiny_model(directory, Shape())
    flags = missing_flags(given, TINY_FLAGS, told_names())
    name = f" as {TINY_NAME!r}" if TINY_NAME in flags[len(given) :] else ""
    say(f"no --model given: serving the tiny random model in {directory}{name}")
    return ["--model", str(directory), *flags]


def missing_flags(given: Sequence[str], defaults: dict[str, str | None], told: Collection[str] = ()) -> list[str]:
    """Return `given` and those of `defaults` that neither it names, in either spelling of a flag, nor `told`."""
    named = {_bare(flag.partition("=")[0]) for flag in given if flag.startswith("--")} | {_bare(name) for name in told}
    flags = list(given)
    for flag, value in defaults.items():
        if _bare(flag) not in named:
            flags += [flag] if value is None else [flag, value]
    return flags


def _bare(flag: str) -> str:
    """Return the setting that a flag, or its opposite, is of."""
    return flag.removeprefix("--").replace("_", "-").removeprefix("no-")


def told_names() -> set[str]:
    """Return the names of the settings and engine arguments that environment or file give the workers."""
    names = {name for name in WORKER_SETTINGS if said_to("worker", name) is not None}
    arguments = said_to("worker", ARGUMENTS)
    if isinstance(arguments, str):  # of a variable, which stands in the place of the whole table
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return names | (arguments.keys() if isinstance(arguments, dict) else set())


def _value(flags: Sequence[str], name: str) -> str:
    for position, flag in enumerate(flags):
        if flag == name and position + 1 < len(flags):
            return flags[position + 1]
        if flag.startswith(f"{name}="):
            return flag.partition("=")[2]
    return told_to("worker", name.strip("-").replace("-", "_"))


def _listen(base_port: int, offset: int) -> str:
    return f"127.0.0.1:{base_port + offset if base_port else 0}"


def _metrics(base_port: int, offset: int) -> list[str]:
    return ["--metrics-listen", f"127.0.0.1:{base_port + offset}"] if base_port else []
