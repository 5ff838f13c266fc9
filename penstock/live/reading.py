"""What queue and scheduler said at one time."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.queue.v1.queue_pb2 import StatsResponse
from penstock.scheduler.v1.scheduler_pb2 import StatusResponse


@dataclass(frozen=True, slots=True)
class Reading:
    """The answers of both services; None for one that did not answer, with the reason."""

    at_s: float
    """When they were asked, on a monotonic clock."""
    queue: StatsResponse | None
    fleet: StatusResponse | None
    problems: tuple[str, ...]
    """A line for each service that did not answer."""
    refused: bool = False
    """Whether one of them answered that the asker may not know: the API key is missing or not good for it."""
    absent: bool = False
    """Whether there was nobody at the address of one of them."""

    @property
    def counts(self) -> StatsResponse | None:
        """The queue's answer, unless it told no more than names: a client may not see its numbers."""
        return None if self.queue is None or self.queue.names_only else self.queue

    def ended(self) -> dict[str, int]:
        """Return the number of ended requests per channel since the queue started."""
        return {c.channel: sum(c.ended_by_outcome) for c in self.counts.channels} if self.counts else {}

    def tokens(self) -> dict[str, int]:
        """Return the number of generated tokens of ended requests per channel since the queue started."""
        return {c.channel: c.completion_tokens for c in self.counts.channels} if self.counts else {}
