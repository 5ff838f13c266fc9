"""What the commands that talk to running services share."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from penstock.cli.errors import CommandError
from penstock.cli.interrupt import run_interruptible
from penstock.errors import (
    InvalidRequest,
    NobodyAnswers,
    NotFound,
    PenstockError,
    PermissionDenied,
    QuotaExceeded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    WrongService,
)
from penstock.exits import EX_CONFIG, EX_INCOMPLETE, EX_NOPERM, EX_SOFTWARE, EX_TEMPFAIL, EX_UNAVAILABLE, EX_USAGE
from penstock.tracing_variables import TracingError

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
    for kind, status, hint in STATUSES:
        if isinstance(error, kind):
            return CommandError(f"{error}{hint}", status)
    return CommandError(str(error), EX_USAGE)


KEY_HINT = " (PENSTOCK_KEY holds the key)"

STATUSES: tuple[tuple[type[PenstockError], int, str], ...] = (
    (NobodyAnswers, EX_UNAVAILABLE, f"; {HOW_TO_START}"),
    (Unavailable, EX_UNAVAILABLE, ""),
    (Unauthenticated, EX_NOPERM, KEY_HINT),
    (PermissionDenied, EX_NOPERM, KEY_HINT),
    (QuotaExceeded, EX_TEMPFAIL, ""),
    (InvalidRequest, EX_USAGE, ""),
    (TracingError, EX_CONFIG, ""),
    (NotFound, EX_INCOMPLETE, ""),
    (WrongService, EX_UNAVAILABLE, ""),
    (ServiceError, EX_SOFTWARE, ""),
)
"""Exit status of each of the client's errors, and what the user is told besides; the first kind that fits counts."""
