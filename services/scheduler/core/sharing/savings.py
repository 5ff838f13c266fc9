"""Heads that wait for a start that is booked for them on one worker.

The first request that can pay but fits nowhere *saves* on a worker: what ends
there piles up for it, and so may those behind it, on others. It has paid, so its
channel goes on. This is EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System",
1995) with blocks for nodes: others may pass it there only if they do not delay its booked start:

- the start is when, by their channels' hold times, enough of what runs there will have ended, in blocks and sequences;
- one that ends before the start by a cautious estimate may pass;
- so may one that fits in what will be left beside the head at its start: the *extra* blocks and sequences.

Estimates can be wrong. From the booked start on nobody passes any more, so the head waits at most
until then, and for what runs there then. While no hold time is known nobody passes at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.line import Line

FEW_HOLDS = 64
"""Up to so many requests on a worker are looked at one by one to book a start. More end in a steady flow for each of
their channels, which is all that has to be known; then nothing is left over beside the head."""


@dataclass(slots=True, eq=False)
class Saving:
    """A head for which freed blocks of one worker are kept, and what it has paid.

    `peak_blocks` are what it is expected to hold at its fullest. `start_ns` is its booked start, None until somebody
    wants to pass; `passed` are the requests that were granted there meanwhile, with the blocks and sequences each took
    of the extra ones.
    """

    entry: Entry
    account: Account
    line: Line
    worker: Worker
    blocks: int
    peak_blocks: int
    paid_block_ns: int
    start_ns: int | None = None
    extra_blocks: int = 0
    extra_sequences: int = 0
    passed: dict[str, tuple[int, int]] = field(default_factory=dict)
    tier: int = 0
    """That of its channel when it began."""

    @property
    def charged_blocks(self) -> int:
        """What its head will be charged for."""
        return self.worker.charged_blocks(self.blocks, self.entry.announced.completions)

    @property
    def channel(self) -> Channel:
        """Whose head it is."""
        return self.account.channel

    def binds(self, channel: Channel, entry: Entry | None) -> bool:
        """Return whether the saving keeps blocks from the entry: it does not from itself nor from a tier above it."""
        return entry is not self.entry and channel.share.tier >= self.channel.share.tier


class Savings:
    """At most one saving per worker, and one per entry."""

    def __init__(self, holds: Holds) -> None:
        """Start with none; `holds` tells when what runs may end."""
        self._holds = holds
        self._by_epoch: dict[int, Saving] = {}
        self._by_request: dict[str, Saving] = {}
        self._by_account: dict[Account, dict[str, Saving]] = {}
        self._tiers_in: dict[Group, dict[int, int]] = {}
        """How many savings of each tier there are in each group."""

    def __iter__(self) -> Iterator[Saving]:
        """Iterate over a copy of the savings."""
        return iter(list(self._by_epoch.values()))

    def __len__(self) -> int:
        """Return the number of savings."""
        return len(self._by_epoch)

    def by_line(self) -> dict[tuple[Line, Account], list[Saving]]:
        """Return the savings of each line, by the account that has paid for them."""
        found: dict[tuple[Line, Account], list[Saving]] = {}
        for saving in self._by_epoch.values():
            found.setdefault((saving.line, saving.account), []).append(saving)
        return found

    def on(self, worker: Worker) -> Saving | None:
        """Return the saving on the worker."""
        return self._by_epoch.get(worker.epoch)

    def is_of_another(self, worker: Worker, channel: Channel, entry: Entry) -> bool:
        """Whether another request of the channel than `entry` saves on the worker."""
        saving = self._by_epoch.get(worker.epoch)
        return saving is not None and saving.channel is channel and saving.entry is not entry

    def of(self, entry: Entry) -> Saving | None:
        """Return the saving of the entry."""
        return self._by_request.get(entry.request_id)

    def of_account(self, account: Account) -> list[Saving]:
        """Return the savings that were paid from the account, in the order in which they began."""
        return list(self._by_account.get(account, {}).values())

    def accounts(self) -> list[Account]:
        """Return the accounts that savings were paid from."""
        return list(self._by_account)

    def add(self, saving: Saving) -> None:
        """Begin to save; the worker and the entry must have no saving."""
        self._by_epoch[saving.worker.epoch] = saving
        self._by_request[saving.entry.request_id] = saving
        self._by_account.setdefault(saving.account, {})[saving.entry.request_id] = saving
        saving.tier = saving.channel.share.tier
        tiers = self._tiers_in.setdefault(saving.worker.group, {})
        tiers[saving.tier] = tiers.get(saving.tier, 0) + 1

    def remove(self, saving: Saving) -> None:
        """End it."""
        del self._by_epoch[saving.worker.epoch]
        del self._by_request[saving.entry.request_id]
        left = self._by_account[saving.account]
        del left[saving.entry.request_id]
        if not left:
            del self._by_account[saving.account]
        tiers = self._tiers_in[saving.worker.group]
        tiers[saving.tier] -= 1
        if not any(tiers.values()):
            del self._tiers_in[saving.worker.group]

    def are_everywhere(self, group: Group, channel: Channel) -> bool:
        """Return whether one binds the channel on each worker of the group."""
        tiers = self._tiers_in.get(group)
        if tiers is None:
            return False
        return sum(tiers[tier] for tier in tiers if tier <= channel.share.tier) >= len(group.workers)

    def lets_pass(self, saving: Saving, channel: Channel, blocks: int, sequences: int, now_ns: int) -> bool:
        """Return whether a request of `channel` may take so much without delaying the head, whose start is booked."""
        assert saving.start_ns is not None
        if self.is_due(saving, now_ns):
            return False
        cautious_ns = channel.account(saving.account.pool).hold_time.cautious_ns
        ends_before = cautious_ns is not None and now_ns + cautious_ns <= saving.start_ns
        return ends_before or (blocks <= saving.extra_blocks and sequences <= saving.extra_sequences)

    @staticmethod
    def is_due(saving: Saving, now_ns: int) -> bool:
        """Return whether the booked start has come: nobody passes any more."""
        return saving.start_ns is not None and now_ns >= saving.start_ns

    def passed(self, worker: Worker, entry: Entry, channel: Channel, blocks: int) -> None:
        """Note a grant on the worker; if a saving binds it, it uses up what is extra until it ends."""
        saving = self._by_epoch.get(worker.epoch)
        if saving is not None and saving.start_ns is not None and saving.binds(channel, entry):
            sequences = entry.announced.completions
            saving.passed[entry.request_id] = blocks, sequences
            saving.extra_blocks -= blocks
            saving.extra_sequences -= sequences

    def ended(self, worker: Worker, request_id: str) -> None:
        """Give back what was extra of a request that has ended before the head could start."""
        saving = self._by_epoch.get(worker.epoch)
        if saving is not None:
            blocks, sequences = saving.passed.pop(request_id, (0, 0))
            saving.extra_blocks += blocks
            saving.extra_sequences += sequences

    def book_start(self, saving: Saving, kept_blocks: int, kept_sequences: int, now_ns: int) -> None:
        """Book the start: when enough will have ended, and what will be left then; now, while no hold time is known.

        Where the ends expected bring too little, it is the longest usual hold time from now.
        What is kept is fenced off for others than the head.
        """
        worker = saving.worker
        saving.start_ns = now_ns
        # What may be booked ahead is there only when something is about to end, and can be promised to nobody.
        free_blocks = worker.reach_blocks - worker.ledger.ahead_blocks - saving.blocks - kept_blocks
        wanted = min(saving.entry.announced.completions, worker.most_sequences)  # an idle engine takes any
        free_sequences = worker.most_sequences - worker.ledger.sequences - wanted - kept_sequences
        if not self._holds.known or (free_blocks >= 0 and free_sequences >= 0):
            return  # now: nobody passes any more, whatever is left
        if self._holds.count(worker) > FEW_HOLDS:
            saving.start_ns += self._holds.expected_ns(worker, -free_blocks, -free_sequences)
            return
        for end_ns, blocks, sequences in self._holds.expected_ends(worker, now_ns):
            free_blocks += blocks
            free_sequences += sequences
            saving.start_ns = end_ns
            if free_blocks >= 0 and free_sequences >= 0:
                break
        else:
            saving.start_ns = now_ns + self._holds.longest_on_ns(worker)
        saving.extra_blocks = max(free_blocks, 0)
        saving.extra_sequences = max(free_sequences, 0)
