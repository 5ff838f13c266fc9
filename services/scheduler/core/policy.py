"""Admission policies: how much is booked, whether it settles, and who stands in which line.

One small interface with named implementations, so that a benchmark can run
them side by side. A policy decides numbers only; booking, arbitration and
accounting are the same for all.
"""

from __future__ import annotations

from typing import Protocol

from services.scheduler.core.estimate import window_blocks, worst_case_blocks
from services.scheduler.core.messages import Announced, EngineShape


class Policy(Protocol):
    """What distinguishes one admission scheme from another."""

    @property
    def name(self) -> str:
        """Name in configuration, status and `CreditsOpened`."""

    @property
    def settles(self) -> bool:
        """Whether the tokenizer ACK shrinks the booking; else it is held to the end."""

    @property
    def channels_apart(self) -> bool:
        """Whether each channel has a line and a share of its own; else all requests stand in one line."""

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the blocks to book for the request on an engine of this shape, at least 1."""


class WorstCase:
    """The old pull: a whole window per completion, held to the end, one line for everyone."""

    name = "worst-case"
    settles = False
    channels_apart = False

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the blocks of the whole window."""
        return window_blocks(request, shape)


class TokenizerAckPolicy:
    """Books what is proven to suffice, shrinks it when the prompt is tokenized; one line for everyone."""

    name = "tokenizer-ack"
    settles = True
    channels_apart = False

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the proven worst case."""
        return worst_case_blocks(request, shape)


class VirtualChannels:
    """As `tokenizer-ack`, with a line, a weight, a guarantee and a ceiling for each channel."""

    name = "virtual-channels"
    settles = True
    channels_apart = True

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the proven worst case."""
        return worst_case_blocks(request, shape)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (WorstCase(), TokenizerAckPolicy(), VirtualChannels())}
"""Every policy by the name that configuration gives it."""

DEFAULT_POLICY = VirtualChannels.name
