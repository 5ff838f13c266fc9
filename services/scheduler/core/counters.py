"""Counts since the start of the service, kept by the machine and read by metrics and status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from services.scheduler.core.messages import CompletionAck, ReleaseCause
from services.scheduler.core.standing import PREFIX

EPOCH_END = "epoch_end"
TOKENIZER_ACK = "tokenizer_ack"
COMPLETION_ACK = "completion_ack"
GRANT_USED = "grant_used"
STANDING_UNUSED = "standing_unused"

CAUSE_NAMES = {cause: cause.name.lower() for cause in ReleaseCause}


@dataclass(slots=True)
class Counters:
    """Everything that happened, and everything that was absorbed without effect, by kind."""

    grants: Counter[str] = field(default_factory=Counter)
    """Grants by channel."""
    standing_used: Counter[str] = field(default_factory=Counter)
    """Those of them that stood ready before their request, by channel."""
    refunds: Counter[str] = field(default_factory=Counter)
    """ACKs or epoch ends that sent blocks home: by `tokenizer_ack`, release cause, `standing_unused` or `epoch_end`."""
    refunded_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks they sent home, by the same names."""
    stale: Counter[str] = field(default_factory=Counter)
    """Messages of an epoch that is over or not their stream's, by kind."""
    duplicates: Counter[str] = field(default_factory=Counter)
    """ACKs that repeated or came after a later one, by kind."""
    unknown: Counter[str] = field(default_factory=Counter)
    """ACKs of what the worker holds nothing for, by kind."""
    refused_settles: int = 0
    """Tokenizer ACKs that asked for more than was free, or came under a policy that does not settle."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Requests rejected because no worker could ever hold them, by code."""
    audit_violations: int = 0
    """What the audit found: violations of the conservation law, and requests that are nowhere; must stay 0."""

    def refunded(self, cause: str, blocks: int) -> None:
        """Count `blocks` that came home."""
        if blocks > 0:
            self.refunds[cause] += 1
            self.refunded_blocks[cause] += blocks

    def released(self, ack: CompletionAck, blocks: int) -> None:
        """Count `blocks` that an ACK brought home; what stood for nobody has completed nothing."""
        self.refunded(STANDING_UNUSED if ack.request_id.startswith(PREFIX) else CAUSE_NAMES[ack.cause], blocks)
