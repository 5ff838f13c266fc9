"""What heads have paid that wait for a worker to save on, where others save on all of theirs.

Rounds go on while a head waits, for there may be workers that are idle; those behind it and in its channel's other
lines would spend what it could pay. So it pays when it begins to wait. It goes no sooner for that than if its channel
had spent nothing since: weights decide whose turn it is.

Of the heads that the same workers serve one pays: with a turn in hand for each model that it asks for, a channel would
have more of those workers the more models it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Fleet, Group
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.line import Line, order


class Deposit:
    """What one head has paid."""

    __slots__ = ("account", "entry", "line", "paid_block_ns", "since_block_ns")

    def __init__(self, entry: Entry, account: Account, line: Line, paid_block_ns: int) -> None:
        """Note it."""
        self.entry = entry
        self.account = account
        self.line = line
        self.paid_block_ns = paid_block_ns
        self.since_block_ns = account.deficit_block_ns - account.gained_block_ns
        """With all its channel ever gained: what that would have in hand if nothing else had been spent since."""


class Deposits:
    """The deposits by request, which this owns."""

    def __init__(self, fleet: Fleet) -> None:
        """Start with none; heads wait for workers of the `fleet`."""
        self._fleet = fleet
        self._by_request: dict[str, Deposit] = {}
        self._by_account: dict[Account, dict[str, Deposit]] = {}
        self._by_line: dict[Line, dict[str, Deposit]] = {}
        self.payments = 0
        """How often anything was paid, spent or paid back."""
        self.in_doubt = False
        """Whether workers have come or gone away, so that any of them may be in vain."""

    def of(self, entry: Entry) -> Deposit | None:
        """Return what was paid for the entry."""
        return self._by_request.get(entry.request_id)

    def of_account(self, account: Account) -> list[Deposit]:
        """Return what was paid from the account, in the order in which it was."""
        return list(self._by_account.get(account, {}).values())

    def _of_line(self, line: Line) -> list[Deposit]:
        """Return what was paid for entries of the line, at any pool."""
        return list(self._by_line.get(line, {}).values())

    def groups(self, deposit: Deposit) -> list[Group]:
        """Return the groups whose workers it waits for, those among them that have come since."""
        return self._fleet.serving(deposit.line.model)

    def __iter__(self) -> Iterator[Deposit]:
        """Iterate over a copy of the deposits."""
        return iter(list(self._by_request.values()))

    def in_line(self, account: Account, line: Line) -> list[Entry]:
        """Return the entries of the line that were paid for from the account."""
        return [deposit.entry for deposit in self.of_account(account) if deposit.line is line]

    def another_waits(self, account: Account, head: Entry, groups: Iterable[Group]) -> bool:
        """Return whether another head than this one was paid for and waits for workers of the `groups`."""
        found = self._by_account.get(account)
        return found is not None and any(
            deposit.entry is not head and any(group in self.groups(deposit) for group in groups)
            for deposit in found.values()
        )

    def older_waits(self, account: Account, head: Entry) -> bool:
        """Return whether one that is older than the head was paid for and waits for workers that serve the head."""
        groups = self._fleet.serving(head.announced.model)
        others = [deposit for deposit in self.of_account(account) if order(deposit.entry) < order(head)]
        return any(group in self.groups(deposit) for deposit in others for group in groups)

    def wait(self, account: Account, line: Line, head: Entry, cost_block_ns: int) -> None:
        """Pay for a head that waits, once."""
        if head.request_id in self._by_request:
            return
        self.payments += 1
        deposit = Deposit(head, account, line, account.pay(cost_block_ns))
        self._by_request[head.request_id] = deposit
        self._by_account.setdefault(account, {})[head.request_id] = deposit
        self._by_line.setdefault(line, {})[head.request_id] = deposit
        account.channel.uncover(line)

    def take(self, entry: Entry, account: Account) -> int:
        """End the deposit of an entry that starts or saves, if it has one, and return what was paid from the account.

        What was paid from another goes back there.
        """
        deposit = self._by_request.pop(entry.request_id, None)
        if deposit is None:
            return 0
        self.payments += 1
        left = self._by_account[deposit.account]
        del left[entry.request_id]
        if not left:
            del self._by_account[deposit.account]
        left = self._by_line[deposit.line]
        del left[entry.request_id]
        if not left:
            del self._by_line[deposit.line]
        if deposit.account is account:
            return deposit.paid_block_ns
        deposit.account.refund(deposit.paid_block_ns)
        return 0

    def return_in_vain(
        self,
        channels: Iterable[Channel],
        first_of: Callable[[Account, Line, int], list[Entry]],
        could_hold: Callable[[Account, Entry], bool],
    ) -> None:
        """Pay back where another is the `first_of` its line by now, or no worker that takes grants `could_hold` it.

        While those are away that it waits for, it would keep its channel from others. Looked at are those of lines of
        the `channels` that have moved, and all only when workers have come or gone away.
        """
        moved: list[Line] = []
        for channel in channels:
            moved += channel.moved
            channel.moved.clear()
        found = list(self) if self.in_doubt else [deposit for line in moved for deposit in self._of_line(line)]
        self.in_doubt = False
        for deposit in found:
            line, account, entry = deposit.line, deposit.account, deposit.entry
            present = account.channel.lines.get(line.model) is line
            if not present or entry not in first_of(account, line, 1) or not could_hold(account, entry):
                account.refund(self.take(entry, account))
                account.channel.moved[line] = None  # without a model it may be the first in other pools
