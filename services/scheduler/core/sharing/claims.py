"""What is claimed of workers, and for how long: as much as whoever waits for them may have in hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.core.fleet import Group, Pool
from services.scheduler.core.sharing.account import Account
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.deposits import Deposits
from services.scheduler.core.sharing.holds import Holds
from services.scheduler.core.sharing.savings import Savings


class Claims:
    """Counts blocks held and saved for, and usual hold times, as they were when first asked for in a pass."""

    def __init__(self, holds: Holds, savings: Savings, deposits: Deposits) -> None:
        """Count what these say."""
        self._holds = holds
        self._savings = savings
        self._deposits = deposits
        self._blocks: dict[Group, int] = {}
        self._longest: dict[Pool, int] = {}

    def begin(self) -> None:
        """Start a pass: count anew."""
        self._blocks.clear()
        self._longest.clear()

    def most_rounds(self, pool: Pool, groups: Iterable[Group], lightest_block_ns: int, ring: Sequence[Channel]) -> int:
        """Return the rounds after which who waits for workers of the `groups` has as much in hand as it could use.

        A round gives the lightest of those that take turns there `lightest_block_ns`. `ring` are all channels.
        """
        return self.longest_ns(pool, ring) * sum(map(self._claimed_blocks, groups)) // lightest_block_ns

    def by_workers(self, accounts: list[Account]) -> list[tuple[set[Group], list[Account]]]:
        """Return the accounts at a pool apart that wait for other workers, with the groups of these."""
        if not accounts:
            return []
        pool = accounts[0].pool
        if len(pool.groups) == 1:
            return [(set(pool.groups), accounts)]
        apart: list[tuple[set[Group], list[Account]]] = []
        for account in accounts:
            groups = {saving.worker.group for saving in self._savings.of_account(account)}
            for deposit in self._deposits.of_account(account):
                groups.update(self._deposits.groups(deposit))
            alike = [account]
            for others in [others for others in apart if not others[0].isdisjoint(groups)]:
                apart.remove(others)
                groups |= others[0]
                alike += others[1]
            apart.append((groups, alike))
        return apart

    def longest_ns(self, pool: Pool, ring: Sequence[Channel]) -> int:
        """Return the longest usual hold time of those who hold or want blocks there."""
        longest_ns = self._longest.get(pool)
        if longest_ns is None:
            accounts = [account for channel in ring if (account := channel.account_if_any(pool)) is not None]
            concerned = [account for account in accounts if account.running or account.has_work]
            longest_ns = self._longest[pool] = max(map(self._holds.usual_of_ns, concerned), default=0)
        return longest_ns

    def _claimed_blocks(self, group: Group) -> int:
        """Return what is held and saved for on all workers of a group."""
        claimed = self._blocks.get(group)
        if claimed is None:
            workers = group.workers.values()
            savings = [saving for worker in workers if (saving := self._savings.on(worker)) is not None]
            claimed = sum(worker.ledger.held_blocks for worker in workers) + sum(saving.blocks for saving in savings)
            self._blocks[group] = claimed
        return claimed
