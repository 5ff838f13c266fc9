"""`penstock drain`, `backup`, `restore`, `verify-store`: what keeps a fleet running."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.calls import QUICK_RETRY_S, QueueOption, SchedulerOption, call
from penstock.cli.errors import CommandError
from penstock.client import Client
from penstock.connection import Patience
from penstock.errors import NotFound, Unavailable
from penstock.exits import EX_INCOMPLETE, EX_USAGE
from penstock.fleet import BACK_WITHIN_S, young_for_s
from penstock.telling import tell

T = TypeVar("T")

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
        async with Client(DEFAULT_QUEUE_ADDRESS, scheduler, retry_for_s=0) as client:
            if undo:
                await _told(client, worker, client.undrain_worker)
                print(f"{worker} takes grants again")
                return
            left = await _told(client, worker, client.drain_worker)
            print(f"{worker} takes no new grants; {left} requests run on it", flush=True)
        if wait:
            async with Client(DEFAULT_QUEUE_ADDRESS, scheduler, retry_for_s=BACK_WITHIN_S) as client:
                await _drained(client, worker)
            print(f"{worker} is drained")

    call(work())


async def _told(client: Client, worker: str, order: Callable[[str], Awaitable[T]]) -> T:
    """Give the scheduler an order for `worker`; return its answer.

    Waits for a scheduler that does not answer, and for a worker that may be about to come back to it. Raises NotFound
    for one that the scheduler would know, CommandError for one that stays away, and the client's errors.
    """
    away, missing = _Waiting(), _Waiting()
    while True:
        try:
            try:
                return await order(worker)
            except NotFound:
                status = await client.fleet()
                if status.up_ns and not young_for_s(status):
                    raise
            away.over()
            doubt = _unknown(worker)
            await missing.go_on(f"{worker} is not connected to the scheduler", CommandError(doubt, EX_INCOMPLETE))
        except Unavailable as error:
            await away.go_on("the scheduler does not answer", error)


class _Waiting:
    """For what may be back soon; says once that it is waited for."""

    def __init__(self) -> None:
        """Wait for nothing yet."""
        self._patience = Patience(BACK_WITHIN_S)
        self._said = False

    def over(self) -> None:
        """It is back."""
        self._patience.succeeded()

    async def go_on(self, what: str, error: Exception) -> None:
        """Pause; raises `error` once it has been away for BACK_WITHIN_S."""
        if not self._said:
            self._said = True
            tell(f"{what}; waiting for at most {BACK_WITHIN_S:g} s", sys.stderr)
        await self._patience.wait_or_raise(error)


def _unknown(worker: str) -> str:
    return f"{worker} is not connected to the scheduler: what runs on it, if it lives, is not known"


async def _drained(client: Client, worker: str) -> None:
    """Return when nothing runs on the worker; raises CommandError if it stays away or takes grants again."""
    patience = Patience(BACK_WITHIN_S)
    while True:
        view = next((view for view in (await client.fleet()).workers if view.worker_id == worker), None)
        if view is None:
            # A scheduler that was started anew knows a worker when that has come back. Of one that cannot reach it, and
            # goes on, no scheduler knows.
            await patience.wait_or_raise(CommandError(_unknown(worker), EX_INCOMPLETE))
            continue
        if view.draining and not view.reservations:
            return
        if view.connected and not view.draining:
            raise CommandError(f"{worker} takes grants again: it was started anew or undrained", EX_INCOMPLETE)
        patience.succeeded()
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
    with_violations: Annotated[
        bool, typer.Option("--with-violations", help="Restore what is there though rows of it contradict each other.")
    ] = False,
) -> None:
    """Make a data directory of a backup, for a queue to be started on."""
    _offline("restore", str(backup), str(data_dir), flags=["--with-violations"] if with_violations else [])


def verify_store(
    directory: Annotated[
        Path, typer.Argument(help="Data directory of a stopped queue, or a backup.", metavar="DIR", readable=False)
    ],
) -> None:
    """Check every invariant of a store that no queue uses, and name what breaks one; repairs nothing."""
    _offline("verify", str(directory))


def _offline(*arguments: str, flags: Sequence[str] = ()) -> None:
    """Become a tool of the queue service: a child would go on when a signal ends the command."""
    for argument in arguments:
        if argument.startswith("-"):
            raise CommandError(f"unexpected argument {argument!r}", EX_USAGE)
    os.execv(sys.executable, [sys.executable, "-m", OFFLINE, *arguments, *flags])
