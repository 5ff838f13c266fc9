"""What heads have paid that wait for a worker to save on, where others save on all of theirs.

Where a channel has one line no round begins while its head waits, so it has its turn when those with more to spare have
spent that. A channel with several lines goes on meanwhile, and so do rounds, for others have workers that are idle; its
other lines would spend what the head could pay. So there it pays when it begins to wait. It goes no sooner for that
than if its channel had spent nothing since: weights decide whose turn it is.

Of the heads that the same workers serve one pays: with a turn in hand for each model that it asks for, a channel would
have more of those workers the more models it asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Group
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.line import Line


class Deposit:
    """What one head has paid."""

    __slots__ = ("channel", "entry", "groups", "line", "paid_block_ns", "since_block_ns")

    def __init__(
        self, entry: Entry, channel: Channel, line: Line, groups: tuple[Group, ...], paid_block_ns: int
    ) -> None:
        """Note it; `groups` serve the entry."""
        self.groups = groups
        self.entry = entry
        self.channel = channel
        self.line = line
        self.paid_block_ns = paid_block_ns
        self.since_block_ns = channel.deficit_block_ns - channel.gained_block_ns
        """With all its channel ever gained: what that would have in hand if nothing else had been spent since."""


class Deposits:
    """The deposits by request, which this owns."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_request: dict[str, Deposit] = {}
        self._by_channel: dict[Channel, dict[str, Deposit]] = {}

    def of_channel(self, channel: Channel) -> Iterator[Deposit]:
        """Yield what heads of the channel have paid."""
        return iter(self._by_channel.get(channel, {}).values())

    def another_waits(self, channel: Channel, head: Entry, groups: Iterable[Group]) -> bool:
        """Return whether another head of the channel than this one has paid and waits for workers of the `groups`."""
        found = self._by_channel.get(channel)
        return found is not None and any(
            deposit.entry is not head and any(group in deposit.groups for group in groups) for deposit in found.values()
        )

    def of(self, entry: Entry) -> int:
        """Return what the entry has paid, 0 if nothing."""
        deposit = self._by_request.get(entry.request_id)
        return 0 if deposit is None else deposit.paid_block_ns

    def since_block_ns(self, entry: Entry) -> int:
        """Return what, with all that its channel ever gained, that would have in hand, had it spent nothing since."""
        return self._by_request[entry.request_id].since_block_ns

    def wait(
        self, channel: Channel, line: Line, head: Entry, groups: Iterable[Group], cost_block_ns: int, alone: bool
    ) -> None:
        """Let the channel pay for a head that waits, once; not if its line is `alone`: nobody else spends that."""
        if alone or head.request_id in self._by_request:
            return
        deposit = Deposit(head, channel, line, tuple(groups), channel.pay(cost_block_ns, 0))
        self._by_request[head.request_id] = deposit
        self._by_channel.setdefault(channel, {})[head.request_id] = deposit

    def take(self, entry: Entry) -> int:
        """End the deposit of an entry that starts or saves, if it has one, and return what it has paid."""
        deposit = self._by_request.pop(entry.request_id, None)
        if deposit is None:
            return 0
        left = self._by_channel[deposit.channel]
        del left[entry.request_id]
        if not left:
            del self._by_channel[deposit.channel]
        return deposit.paid_block_ns

    def return_to_others_than_heads(self) -> None:
        """Pay back where a line has another head by now."""
        for deposit in list(self._by_request.values()):
            line = deposit.channel.lines.get(deposit.line.model)
            if line is not deposit.line or line.head() is not deposit.entry:
                deposit.channel.refund(self.take(deposit.entry))
