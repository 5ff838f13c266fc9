"""Standing grants: credits for a request that is yet to come, and what is said of them.

The scheduler gives them while nothing waits. The worker offers each to the queue, which delivers the next request
that fits; from then on the reservation is that request's. Until then it can be recalled, as any grant that has not met
its request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.core.value import Value


class Standing(Value):
    """The requests that a standing grant is for: with one completion, and no larger than this."""

    def __init__(
        self, model: str, chat: bool, most_prompt_bytes: int, most_prompt_tokens: int, most_output_tokens: int
    ) -> None:
        self.model, self.chat, self.most_prompt_bytes = model, chat, most_prompt_bytes
        self.most_prompt_tokens = most_prompt_tokens
        """0 is for prompts that are not counted yet, and those alone."""
        self.most_output_tokens = most_output_tokens
        """0 is for requests that ask for no number, and those alone."""


class Met(Value):
    """The standing grant that a delivery is for."""

    def __init__(self, grant: str, announced: Any) -> None:
        self.grant = grant
        self.announced = announced
        """The request as the queue would have announced it, opaque to the session."""


class SendOffer(Value):
    """To the queue: deliver the next request that fits."""

    def __init__(self, grant: str, channel: str, standing: Standing) -> None:
        self.grant, self.channel, self.standing = grant, channel, standing


class SendWithdraw(NamedTuple):
    """To the queue: take the offer back."""

    grant: str


class SendGrantUsed(Value):
    """To the scheduler: the credits of the grant are the request's from now on."""

    def __init__(self, epoch: int, grant: str, announced: Any) -> None:
        self.epoch, self.grant, self.announced = epoch, grant, announced
