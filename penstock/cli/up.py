"""`penstock up`: all services on this machine until Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.calls import QUICK_RETRY_S, call
from penstock.cli.config import ConfigOption, take_config, told_to
from penstock.cli.errors import CommandError
from penstock.cli.interrupt import Interrupted
from penstock.cli.stack import Stack, StackPlan, running_stack
from penstock.client import Client
from penstock.config_file import CALLERS
from penstock.credentials import refused_ones
from penstock.errors import PenstockError, Unavailable
from penstock.exits import EX_USAGE
from penstock.live.view import why_refused
from penstock.openai.bodies import CHAT_URL
from penstock.server_flags import wrong_here
from penstock.telling import tell
from penstock.tls import TlsFiles

DEFAULT_DATA_DIR = Path(".run")
DEFAULT_BASE_PORT = 7410
"""Where commands look for a queue unless told otherwise."""

PROXIES = ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
"""Variables by which curl asks a proxy."""

GIVEN = ("--worker-id", "--listen", "--queue-address", "--scheduler-address")
"""Flags with which each worker is started, of the worker itself: a second value would be all workers' alike."""

ALIKE = 0.88
"""Likeness (difflib's) from which on an unknown flag is one of this command's own, misspelt: a letter or two in ten.
No flag of vLLM's is so near, nor one of these with two letters swapped, which difflib takes for two that are wrong."""


def up(
    context: typer.Context,
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of workers, each with an engine of its own.")
    ] = 1,
    model: Annotated[
        str, typer.Option(help="Name or path of the model; without it a tiny random model is made and served.")
    ] = "",
    data_dir: Annotated[
        Path, typer.Option(help="Queue data, logs and the tiny model.", readable=False)
    ] = DEFAULT_DATA_DIR,
    base_port: Annotated[
        int,
        typer.Option(
            help="Queue on this port, gateway 5 above, scheduler 10 above, workers from 20 above; 0 picks free ports."
        ),
    ] = DEFAULT_BASE_PORT,
    metrics_base_port: Annotated[
        int, typer.Option(help="Prometheus: queue on this port, scheduler next, then workers; 0 means none.")
    ] = 0,
    gateway: Annotated[bool, typer.Option(help="Serve OpenAI's HTTP API as well.")] = True,
    config: ConfigOption = None,
) -> None:
    """Start queue, scheduler, workers and gateway; stop them on Ctrl-C. Unknown flags go to the workers' engine.

    Addresses, ports and directories are this command's own; everything else the services take from --config.
    """
    engine_flags = flags_for_the_engine(context)
    serves = gateway and can_serve_http()
    take_config(config)
    plan = StackPlan(
        data_dir,
        workers,
        model,
        engine_flags,
        base_port,
        metrics_base_port,
        serves,
        can_do_without=False,
        gives_up=False,
    )
    try:
        call(_serve(plan))
    except Interrupted:
        say("stopped")


def flags_for_the_engine(context: typer.Context) -> list[str]:
    """Return what this command does not know itself; raises CommandError for what no worker can be given."""
    flags = list(context.args)
    if flags and not flags[0].startswith("-"):
        raise CommandError(f"unexpected argument {flags[0]!r}", EX_USAGE)
    own = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and (why := wrong_here(name)):
            raise CommandError(f"{name} {why}", EX_USAGE)
        if name.replace("_", "-") in GIVEN:
            raise CommandError(f"{name}: each worker is given its own by this command", EX_USAGE)
        # One that is our own stood behind `--`, and is meant for the workers.
        if name.startswith("--") and name not in own and (meant := _meant(name, own)):
            # The engine would refuse it too, but only once it has been loaded.
            raise CommandError(f"unknown flag {flag}; did you mean {meant}?", EX_USAGE)
    return flags


def _meant(name: str, own: Set[str]) -> str:
    """Return the flag of `own` that `name` is, misspelt; empty if there is none."""
    swapped = {name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1)}
    return next(iter(swapped & own or get_close_matches(name, own, 1, ALIKE)), "")


async def _serve(plan: StackPlan) -> None:
    say(f"logs        {plan.data_dir / 'logs'}")  # first: an engine takes long, and its log says why
    async with running_stack(plan, say) as stack:
        say(f"queue       {stack.queue}")
        say(f"scheduler   {stack.scheduler}")
        for number, address in enumerate(stack.workers, 1):
            say(f"worker-{number}    {address}")
        if stack.gateway:
            url = gateway_url(stack.gateway)
            say(f"gateway     {url}/v1")
            say(f"console     {url}/")
            say(f"try         {example(url, await _served_model(stack))}")
        if refused := refused_by_keys(plan.services):
            say(f"note: {refused}")
        refusal = await _refusal(stack)
        say(f"ready{refusal and f', but submits are refused: {refusal}'}; Ctrl-C stops everything")
        await stack.supervisor.failed()


async def _served_model(stack: Stack) -> str:
    """Return the name of the model for the example; empty, which stands for the only one, if the scheduler won't tell.

    It may ask for a key, and the services' own is not this command's. That it is not reached is said: it is up.
    """
    try:
        async with Client(stack.queue, stack.scheduler, retry_for_s=QUICK_RETRY_S) as client:
            return next((worker.model for worker in (await client.fleet()).workers), "")
    except Unavailable as error:
        tell(f"note: the scheduler is up, and cannot be asked from here: {error}", sys.stderr)
    except PenstockError:
        pass
    return ""


async def _refusal(stack: Stack) -> str:
    """Return why the queue takes no submits now; empty if it takes them, or does not tell this command."""
    with suppress(PenstockError):
        async with Client(stack.queue, retry_for_s=QUICK_RETRY_S) as client:
            told = await client.stats()
            return why_refused(told) if told.submits_refused else ""
    return ""


def refused_by_keys(services: Sequence[str]) -> str:
    """Return what is to be said of those of `services` that cannot prove who they are where there are keys."""
    has_keys = any(told_to(service, "keys") for service in ("queue", "scheduler"))
    callers = [name for name in CALLERS if name in services]
    return refused_ones(has_keys, {name: bool(told_to(name, "key") or told_to(name, "tls_cert")) for name in callers})


def can_serve_http() -> bool:
    """Whether what the gateway needs is installed; says how to get it if not."""
    found = all(find_spec(name) for name in ("starlette", "uvicorn", "httptools"))
    if not found:
        say("no gateway: its packages are missing (pip install 'penstock[gateway]'); --no-gateway leaves it out")
    return found


def gateway_url(address: str) -> str:
    """Return the URL of the gateway at HOST:PORT, which the environment and the configuration file tell about TLS."""
    return f"{'https' if told_to('gateway', 'tls_cert') else 'http'}://{address}"


def example(url: str, model: str) -> str:
    """Return a command that asks the gateway for a chat, with what TLS and keys take."""
    flags = []
    if url.startswith("https:"):
        files = TlsFiles.from_environment()
        named = {"--cacert": files.ca, "--cert": files.cert, "--key": files.key}
        flags += [f"{flag} {shlex.quote(file)}" for flag, file in named.items() if file]
    if told_to("queue", "keys"):
        flags.append('-H "authorization: Bearer $KEY"')  # a client's; the services' own may not ask
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    flags += ["-H 'content-type: application/json'", f"-d {shlex.quote(json.dumps(body))}"]
    # Of a proxy that is for other traffic curl would ask even the loopback.
    direct = "--noproxy '*' " if any(os.environ.get(name) for name in PROXIES) else ""
    return f"curl {direct}{url}{CHAT_URL} {' '.join(flags)}"


def say(text: str) -> None:
    """Print a line at once; nobody has to read it."""
    tell(text, sys.stdout)
