"""Takes readings from running services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from penstock.client import Client
from penstock.errors import NobodyAnswers, PenstockError, PermissionDenied, Unauthenticated
from penstock.live.reading import Reading
from penstock.queue.v1.queue_pb2 import StatsResponse
from penstock.scheduler.v1.scheduler_pb2 import StatusResponse

ANSWER_S = 5.0
"""Longest wait for one answer beyond the client's own retries: a service that is stopped in a debugger, or whose host
has vanished, refuses nothing and never answers."""

T = TypeVar("T")


async def take(client: Client, answer_s: float = ANSWER_S) -> Reading:
    """Ask both services at once; what one does not answer is a problem of the reading, never an error."""
    at_s = time.monotonic()
    queue, fleet = await asyncio.gather(
        _answer("queue", client.stats(), answer_s), _answer("scheduler", client.fleet(), answer_s)
    )
    return Reading(
        at_s,
        queue if isinstance(queue, StatsResponse) else None,
        fleet if isinstance(fleet, StatusResponse) else None,
        tuple(str(answer) for answer in (queue, fleet) if isinstance(answer, str)),
        any(isinstance(answer, Refusal) for answer in (queue, fleet)),
        any(isinstance(answer, Absence) for answer in (queue, fleet)),
    )


class Refusal(str):
    """Why a service that is there gave no answer."""


class Absence(str):
    """That there is no service to give an answer."""


async def _answer(who: str, asking: Awaitable[T], answer_s: float) -> T | str:
    """Return the answer, or why there is none."""
    try:
        async with asyncio.timeout(answer_s):
            return await asking
    except (Unauthenticated, PermissionDenied) as error:
        return Refusal(f"the {who} refuses to tell: {error}")
    except NobodyAnswers as error:
        return Absence(f"the {who} does not answer: {error}")
    except PenstockError as error:
        return f"the {who} does not answer: {error}"
    except TimeoutError:
        return f"the {who} does not answer within {answer_s:g} s"
