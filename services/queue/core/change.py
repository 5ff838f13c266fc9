"""One input to one request, with what the actions of the lifecycle table need for it."""

from __future__ import annotations

from typing import Any, Final

from services.core.value import Value
from services.queue.core.effects import StopReason
from services.queue.core.entry import Failure
from services.queue.core.lifecycle import Input, Outcome

STOP_REASONS: Final = {Outcome.CANCELLED: StopReason.CLIENT, Outcome.EXPIRED: StopReason.DEADLINE}
"""What a worker is told of a request that is stopped, by the outcome that it is to have."""


class Lessee(Value):
    """The worker that a request is leased to, and how it is delivered there."""

    def __init__(
        self,
        worker_id: str,
        instance_id: str,
        stream: int,
        watched: bool,
        grant: str = "",
        payload: bytes | None = None,
    ) -> None:
        self.worker_id, self.instance_id, self.stream, self.watched = worker_id, instance_id, stream, watched
        self.grant, self.payload = grant, payload
        """As Deliver has them."""


class Change(Value):
    """What happens to a request, and when."""

    def __init__(
        self,
        event: Input,
        now_ns: int,
        outcome: Outcome | None = None,
        failure: Failure | None = None,
        body: Any = None,
        to: Lessee | None = None,
        stream: int | None = None,
        exhausted_by: Input | None = None,
    ) -> None:
        self.event, self.now_ns, self.outcome, self.failure = event, now_ns, outcome, failure
        self.body = body
        """The worker's result; of a submit, the encoded request."""
        self.to = to
        """Whose claim it is."""
        self.stream = stream
        """Where the worker hears of it that a request is to stop; None if it is not connected."""
        self.exhausted_by = exhausted_by
        """Which of those that EXHAUST stands for."""


def stop_failure(outcome: Outcome | None) -> Failure:
    """Return the error of a request that was stopped with `outcome`."""
    if outcome is Outcome.EXPIRED:
        return Failure("deadline_exceeded", "the request's deadline passed before it was answered", "deadline_unix_ns")
    return Failure("cancelled", "the client cancelled the request")
