"""Standing grants: credits for a request that is yet to come, and what is said of them.

The scheduler gives them while nothing waits. The worker offers each to the queue, which delivers the next request
that fits; from then on the reservation is that request's. Until then it can be recalled, as any grant that has not met
its request.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Standing(NamedTuple):
    """The requests that a standing grant is for: with one completion, and no larger than this."""

    model: str
    chat: bool
    most_prompt_bytes: int
    most_prompt_tokens: int
    """0 is for prompts that are not counted yet, and those alone."""
    most_output_tokens: int
    """0 is for requests that ask for no number, and those alone."""


class Met(NamedTuple):
    """The standing grant that a delivery is for."""

    grant: str
    announced: Any
    """The request as the queue would have announced it, opaque to the session."""


class SendOffer(NamedTuple):
    """To the queue: deliver the next request that fits."""

    grant: str
    channel: str
    standing: Standing


class SendWithdraw(NamedTuple):
    """To the queue: take the offer back."""

    grant: str


class SendGrantUsed(NamedTuple):
    """To the scheduler: the credits of the grant are the request's from now on."""

    epoch: int
    grant: str
    announced: Any
