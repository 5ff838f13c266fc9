"""Counts since the start of the service, kept by the machine and read by metrics and status."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from services.scheduler.core.messages import CompletionAck, ReleaseCause
from services.scheduler.core.standing import PREFIX

EPOCH_END: Final = "epoch_end"
TOKENIZER_ACK: Final = "tokenizer_ack"
COMPLETION_ACK: Final = "completion_ack"
GRANT_USED: Final = "grant_used"
STANDING_UNUSED: Final = "standing_unused"
LEAVING: Final = "leaving"
ENGINE_REPORT: Final = "engine_report"
SECOND_RELEASE: Final = "second_release"

CAUSE_NAMES: Final = {cause: cause.name.lower() for cause in ReleaseCause}

REFUNDS: Final = (TOKENIZER_ACK, EPOCH_END, STANDING_UNUSED, *CAUSE_NAMES.values())
STALE_KINDS: Final = (GRANT_USED, ENGINE_REPORT, TOKENIZER_ACK, COMPLETION_ACK, LEAVING)
DUPLICATE_KINDS: Final = (TOKENIZER_ACK, COMPLETION_ACK, SECOND_RELEASE)
UNKNOWN_KINDS: Final = (GRANT_USED, TOKENIZER_ACK, COMPLETION_ACK)


class Counters:
    """Everything that happened, and everything that was absorbed without effect, by kind."""

    # Not `Counter`, whose items are set by a call into Python because it has a way of its own to delete them.
    def __init__(self) -> None:
        """Start with nothing counted."""
        self.grants: defaultdict[str, int] = defaultdict(int)
        """Grants by channel."""
        self.standing_used: defaultdict[str, int] = defaultdict(int)
        """Those of them that stood ready before their request, by channel."""
        self.refunds: defaultdict[str, int] = defaultdict(int)
        """ACKs or epoch ends that sent blocks home: by `tokenizer_ack`, release cause, `standing_unused` or
        `epoch_end`."""
        self.refunded_blocks: defaultdict[str, int] = defaultdict(int)
        """Blocks they sent home, by the same names."""
        self.stale: defaultdict[str, int] = defaultdict(int)
        """Messages of an epoch that is over or not their stream's, by kind."""
        self.duplicates: defaultdict[str, int] = defaultdict(int)
        """ACKs that repeated or came after a later one, by kind."""
        self.unknown: defaultdict[str, int] = defaultdict(int)
        """ACKs of what the worker holds nothing for, by kind."""
        self.refused_settles = 0
        """Tokenizer ACKs that asked for more than was free, or came under a policy that does not settle."""
        self.rejected: defaultdict[str, int] = defaultdict(int)
        """Requests rejected because no worker could ever hold them, by code."""
        self.audit_violations = 0
        """What the audit found: violations of the conservation law, and requests that are nowhere; must stay 0."""

    def refunded(self, cause: str, blocks: int) -> None:
        """Count `blocks` that came home."""
        if blocks > 0:
            self.refunds[cause] += 1
            self.refunded_blocks[cause] += blocks

    def released(self, ack: CompletionAck, blocks: int) -> None:
        """Count `blocks` that an ACK brought home; what stood for nobody has completed nothing."""
        self.refunded(STANDING_UNUSED if ack.request_id.startswith(PREFIX) else CAUSE_NAMES[ack.cause], blocks)
