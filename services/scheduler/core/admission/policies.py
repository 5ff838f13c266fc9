"""The admission policies there are, by name: implementations of one small interface (`policy`).

They differ in how much is booked, whether it settles, and who stands in which line; a benchmark runs them side by side.
"""

from __future__ import annotations

from typing import ClassVar

from services.scheduler.core.admission.estimate import window_blocks, worst_case_blocks
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.admission.predictive import Predictive
from services.scheduler.core.messages import Announced, EngineShape


class WorstCase(Policy):
    """The old pull: a whole window per completion, held to the end, one line for everyone."""

    name: ClassVar[str] = "worst-case"
    settles: ClassVar[bool] = False

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the blocks of the whole window."""
        return window_blocks(request, shape)


class TokenizerAckPolicy(Policy):
    """Books what is proven to suffice, shrinks it when the prompt is tokenized; one line for everyone."""

    name: ClassVar[str] = "tokenizer-ack"

    def booking_blocks(self, request: Announced, shape: EngineShape) -> int:
        """Return the proven worst case."""
        return worst_case_blocks(request, shape)


class VirtualChannels(TokenizerAckPolicy):
    """As `tokenizer-ack`, with a line, a weight, a guarantee and a ceiling for each channel."""

    name: ClassVar[str] = "virtual-channels"
    channels_apart: ClassVar[bool] = True


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (WorstCase(), TokenizerAckPolicy(), VirtualChannels(), Predictive())
}
"""Every policy by the name that configuration gives it, with nothing learned and its knobs at their defaults."""

DEFAULT_POLICY = Predictive.name
