"""What an admission policy is: numbers for the arbiter, and ears for what becomes of the requests.

A policy decides numbers only; booking, arbitration and accounting are the same
for all. One that learns overrides the hooks; the others leave them empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from services.scheduler.core.fleet import Worker
from services.scheduler.core.messages import Announced, CompletionAck, EngineReport, EngineShape, TokenizerAck


class Outlook(NamedTuple):
    """What a policy expects of one worker: its peak, margin included, and the margin in standard deviations.

    `preemption_cost_requests` is the engine time of a preemption over that of a request, infinite while unknown.
    `target_preemptions` are as many as it steers to, over all requests that completed there.
    """

    peak_blocks: int
    margin_deviations: float
    recovering: bool
    preemption_cost_requests: float
    target_preemptions: float


class Policy(ABC):
    """What distinguishes one admission scheme from another."""

    name: ClassVar[str]
    """Name in configuration, status and `CreditsOpened`."""

    settles: ClassVar[bool] = True
    """Whether the tokenizer ACK shrinks the booking; else it is held to the end."""

    channels_apart: ClassVar[bool] = False
    """Whether each channel has a line and a share of its own; else all requests stand in one line."""

    reserve_output_tokens: ClassVar[int] = 0
    """Output tokens a running request keeps reserved ahead of what it has generated; 0 reserves all it may
    generate. Reservations that grow may exceed what is free: the engine takes the block anyway."""

    ahead_share: ClassVar[float] = 0.0
    """Share of a worker's pool that may be booked ahead of what is free there, for what will be when a grant arrives.
    Only for a policy whose engines may preempt: what is booked ahead rests on a guess of what ends."""

    lessons: int = 0
    """Grows when bookings are no longer what they were for the same request, so that what waits is asked again."""

    def fresh(self) -> Policy:
        """Return the policy with nothing learned; one that learns nothing is always fresh."""
        return self

    @abstractmethod
    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the blocks to book for the request on an engine of this shape, at least 1.

        They may depend on how the engine counts tokens into blocks, not on its capacity: one answer serves a group.
        """

    def room_blocks(self, request: Announced, worker: Worker, blocks: int, due: bool = False) -> int:
        """Return how large a booking the worker has room for, if `blocks` are what the request books.

        If it is `due`, its start was booked for now, and guarantees have bent to leave it room.
        """
        del request, blocks, due
        return worker.usable_blocks

    def peak_blocks(self, request: Announced, worker: Worker, blocks: int) -> int:
        """Return what the request is expected to hold at its fullest on the worker, where it books `blocks`."""
        del request, worker
        return blocks

    def expected_of(self, worker: Worker, channel: str) -> int:
        """Return what the channel's requests on the worker are expected to hold, each at its fullest."""
        return worker.ledger.held_by(channel)

    def expected_blocks(self, request: Announced, worker: Worker) -> int:
        """Return the blocks that the request is expected to hold at its fullest on a worker of this group."""
        return self.booking_blocks(request, worker.group.shape)

    def outlook(self, worker: Worker) -> Outlook | None:
        """Return what is expected of the worker; None if the policy expects nothing."""
        del worker
        return None

    # ---- what becomes of the requests; empty for a policy that does not learn ----

    def opened(self, worker: Worker) -> None:  # noqa: B027
        """Note a new epoch, its inventory in the ledger."""

    def ended(self, worker: Worker) -> None:  # noqa: B027
        """Note that an epoch is over."""

    def booked(self, worker: Worker, request: Announced, blocks: int, now_ns: int | None) -> None:  # noqa: B027
        """Note a booking; `now_ns` is None for a standing grant, which waits for its request."""

    def met(self, worker: Worker, grant: str, request: Announced, blocks: int) -> None:  # noqa: B027
        """Note that what was booked for a standing grant is the request's."""

    def settled(self, worker: Worker, ack: TokenizerAck, now_ns: int) -> None:  # noqa: B027
        """Note a tokenizer ACK that was applied: the first, or one by which the reservation grew."""

    def released(self, worker: Worker, ack: CompletionAck) -> None:  # noqa: B027
        """Note a completion ACK that was applied."""

    def reported(self, worker: Worker, report: EngineReport) -> bool:
        """Note an engine report; return whether the policy may have more room for the worker than before."""
        del worker, report
        return False
