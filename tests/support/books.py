"""Double-entry books of what channels pay for turns: all of it is somewhere, and of whom it was taken.

They watch methods from outside, which nothing can do to compiled ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from services.scheduler.core.fleet import Worker
from services.scheduler.core.machine import Machine
from services.scheduler.core.messages import ReleaseCause
from services.scheduler.core.sharing.channel import Account
from services.scheduler.core.sharing.holds import Holds


class Books:
    """What each account paid and had not back, and what of that was for requests that have ended."""

    def __init__(self) -> None:
        """Start empty."""
        self.paid: dict[Account, int] = defaultdict(int)
        self.spent: dict[Account, int] = defaultdict(int)

    def audit(self, machine: Machine) -> None:
        """Assert that what an account paid is in its deposits, savings and holds, or was spent on what has ended."""
        arbiter = machine._arbiter
        found = dict(self.spent)
        for saving in arbiter._savings:
            found[saving.account] = found.get(saving.account, 0) + saving.paid_block_ns
        for deposit in arbiter._deposits._by_request.values():
            found[deposit.account] = found.get(deposit.account, 0) + deposit.paid_block_ns
        running: Counter[Account] = Counter()
        for epoch, holds in arbiter._holds._by_epoch.items():
            blocks: Counter[Account] = Counter()
            sequences: Counter[Account] = Counter()
            for hold in holds.values():
                found[hold.account] = found.get(hold.account, 0) + hold.paid_block_ns
                running[hold.account] += 1
                blocks[hold.account] += hold.blocks
                sequences[hold.account] += hold.sequences
            held = arbiter._holds._held.get(epoch, {})
            assert blocks == {account: of_it.blocks for account, of_it in held.items()}, "blocks by account"
            assert sequences == {account: of_it.sequences for account, of_it in held.items()}, "sequences by account"
        assert {account: account.running for account in running} == running
        off = {
            f"{account.channel.name} at {sorted(account.pool.models)}": self.paid[account] - found.get(account, 0)
            for account in self.paid.keys() | found.keys()
            if self.paid[account] != found.get(account, 0)
        }
        assert not off, f"paid and not accounted for: {off}"


@contextmanager
def kept_books() -> Iterator[Books]:
    """Keep books of all accounts meanwhile."""
    books = Books()
    pay, refund, ended, drop = Account.pay, Account.refund, Holds.ended, Holds.drop

    def note_pay(account: Account, cost_block_ns: int) -> int:
        before_block_ns = account.deficit_block_ns
        paid_block_ns = pay(account, cost_block_ns)
        assert paid_block_ns >= 0
        assert account.deficit_block_ns == before_block_ns - paid_block_ns
        books.paid[account] += paid_block_ns
        return paid_block_ns

    def note_refund(account: Account, block_ns: int) -> None:
        assert block_ns >= 0
        books.paid[account] -= block_ns
        wanted_block_ns = account.deficit_block_ns + block_ns
        refund(account, block_ns)
        assert account.deficit_block_ns == (wanted_block_ns if account.has_work else min(wanted_block_ns, 0))

    def note_ended(holds: Holds, worker: Worker, request_id: str, cause: ReleaseCause, now_ns: int) -> None:
        hold = holds._by_epoch.get(worker.epoch, {}).get(request_id)
        ended(holds, worker, request_id, cause, now_ns)
        if hold is not None:
            books.spent[hold.account] += hold.paid_block_ns

    def note_drop(holds: Holds, worker: Worker, now_ns: int) -> None:
        dropped = list(holds._by_epoch.get(worker.epoch, {}).values())
        drop(holds, worker, now_ns)
        for hold in dropped:
            books.spent[hold.account] += hold.paid_block_ns

    with (
        mock.patch.object(Account, "pay", note_pay),
        mock.patch.object(Account, "refund", note_refund),
        mock.patch.object(Holds, "ended", note_ended),
        mock.patch.object(Holds, "drop", note_drop),
    ):
        yield books
