"""What the commands that talk to running services share."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from penstock.cli.errors import EX_INCOMPLETE, EX_SOFTWARE, EX_UNAVAILABLE, EX_USAGE, CommandError
from penstock.cli.interrupt import run_interruptible
from penstock.errors import InvalidRequest, NotFound, PenstockError, ServiceError, Unavailable

T = TypeVar("T")

QueueOption: TypeAlias = Annotated[
    str, typer.Option("--queue", envvar="PENSTOCK_QUEUE", help="HOST:PORT of the queue.", metavar="ADDRESS")
]
SchedulerOption: TypeAlias = Annotated[
    str, typer.Option("--scheduler", envvar="PENSTOCK_SCHEDULER", help="HOST:PORT of the scheduler.", metavar="ADDRESS")
]

QUICK_RETRY_S = 2.0
"""How long a one-off command retries: enough for a restarting service, short enough to say that none is there."""

HOW_TO_START = "start the services with `penstock up`"


def call(work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a command; what the client raises becomes one line and an exit status."""
    try:
        return run_interruptible(work)
    except PenstockError as error:
        raise command_error(error) from None


def command_error(error: PenstockError) -> CommandError:
    """Return the command's error for one of the client's."""
    match error:
        case Unavailable():
            return CommandError(f"{error}; {HOW_TO_START}", EX_UNAVAILABLE)
        case InvalidRequest():
            return CommandError(str(error), EX_USAGE)
        case NotFound():
            return CommandError(str(error), EX_INCOMPLETE)
        case ServiceError():
            return CommandError(str(error), EX_SOFTWARE)
    return CommandError(str(error), EX_USAGE)
