"""`penstock drain`, `backup`, `restore`, `verify-store`: what keeps a fleet running."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.calls import QUICK_RETRY_S, QueueOption, SchedulerOption, call
from penstock.cli.errors import CommandError
from penstock.client import Client
from penstock.exits import EX_INCOMPLETE, EX_USAGE

DRAIN_POLL_S = 0.2
"""Between looks at a draining worker."""

OFFLINE = "services.queue.offline"


def drain(
    worker: Annotated[str, typer.Argument(help="Name of the worker, as `penstock status` shows it.", metavar="WORKER")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the worker have grants again.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when nothing runs on it any more.")] = True,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
) -> None:
    """Stop granting to a worker and let it finish what it has; it stays drained for as long as it lives."""

    async def work() -> None:
        async with Client(DEFAULT_QUEUE_ADDRESS, scheduler, retry_for_s=QUICK_RETRY_S) as client:
            if undo:
                await client.undrain_worker(worker)
                print(f"{worker} takes grants again")
                return
            left = await client.drain_worker(worker)
            print(f"{worker} takes no new grants; {left} requests run on it", flush=True)
            if wait:
                await _drained(client, worker)
                print(f"{worker} is drained")

    call(work())


async def _drained(client: Client, worker: str) -> None:
    """Return when nothing runs on the worker; raises CommandError if it goes away or takes grants again."""
    while True:
        status = {view.worker_id: view for view in (await client.fleet()).workers}.get(worker)
        if status is None:
            raise CommandError(f"{worker} is gone: what ran on it runs elsewhere", EX_INCOMPLETE)
        if not status.reservations:
            return
        if not status.draining and status.connected:
            raise CommandError(f"{worker} takes grants again: it was started anew or undrained", EX_INCOMPLETE)
        await asyncio.sleep(DRAIN_POLL_S)


def backup(
    name: Annotated[str, typer.Argument(help="Name of the backup; none names it after the time.")] = "",
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Data directory of a queue that is stopped; without it a running one is asked.", readable=False
        ),
    ] = None,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
) -> None:
    """Write a consistent copy of the queue's store beside it, while it runs."""
    if data_dir is not None:
        _offline("backup", str(data_dir), *([name] if name else []))
        return

    async def work() -> None:
        async with Client(queue, retry_for_s=QUICK_RETRY_S) as client:
            made = await client.backup(name)
        print(
            f"{made.path}: backup of store {made.store_id}; {made.waiting} requests waiting, {made.leased} running,"
            f" {made.dead} dead letters, {made.results} results"
        )

    call(work())


def restore(
    backup: Annotated[Path, typer.Argument(help="Directory of the backup.", metavar="BACKUP", readable=False)],
    data_dir: Annotated[Path, typer.Option(help="Data directory to make; must be missing or empty.", readable=False)],
) -> None:
    """Make a data directory of a backup, for a queue to be started on."""
    _offline("restore", str(backup), str(data_dir))


def verify_store(
    directory: Annotated[
        Path, typer.Argument(help="Data directory of a stopped queue, or a backup.", metavar="DIR", readable=False)
    ],
) -> None:
    """Check every invariant of a store that no queue uses, and name what breaks one; repairs nothing."""
    _offline("verify", str(directory))


def _offline(*arguments: str) -> None:
    """Run a tool of the queue service; raises typer.Exit with its status if that is not 0."""
    for argument in arguments:
        if argument.startswith("-"):
            raise CommandError(f"unexpected argument {argument!r}", EX_USAGE)
    status = subprocess.run([sys.executable, "-m", OFFLINE, *arguments], check=False).returncode
    if status:
        raise typer.Exit(status)
