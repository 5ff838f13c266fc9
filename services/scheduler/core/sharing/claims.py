"""Rounds, and what is claimed of workers and for how long: whoever waits for them gains by rounds up to that."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.fleet import Group, Pool
from services.scheduler.core.sharing.bids import Bid
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.deposits import Deposits
from services.scheduler.core.sharing.longest import Longest
from services.scheduler.core.sharing.savings import Savings


class Claims:
    """Gives rounds. Counts what is held and saved for, as it is charged, as when first asked for in a pass."""

    def __init__(self, longest: Longest, savings: Savings, deposits: Deposits) -> None:
        """Count what these say."""
        self._longest = longest
        self._savings = savings
        self._deposits = deposits
        self._blocks: dict[Group, int] = {}

    def begin(self) -> None:
        """Start a pass: count anew."""
        self._blocks.clear()
        self._longest.begin()

    def begin_rounds(self, bids: list[Bid], rounds: int) -> None:
        """Give each channel with work at a pool so many quanta.

        One whose heads all have paid cannot spend meanwhile what others let it gain. More of that in hand than it could
        use would have whoever comes later wait until all of it is spent. Those that wait for the same workers and have
        another turn in hand gain alike, up to where the first of them has as much as it may: what they have in hand
        says whose turn it is. One that has none gains its part whatever others have, or it would have one for each of
        theirs, whatever it holds.
        """
        wait: list[Account] = []
        for bid in bids:
            if bid.wants:
                bid.account.gain(rounds)
            elif bid.takes_part:
                wait.append(bid.account)
        lightest = min(bid.account.quantum_block_ns for bid in bids)
        for groups, accounts in self._by_workers(wait):
            most_rounds = self._most_rounds(accounts[0].pool, groups, lightest)
            left = {account: account.rounds_until(most_rounds * account.quantum_block_ns) for account in accounts}
            in_hand = [account for account in accounts if account.has_in_hand]
            alike = min((left[account] for account in in_hand), default=0)
            for account in accounts:
                account.gain(min(rounds, alike if account.has_in_hand else left[account]))

    def hold_to_weights(self, tier: list[Channel], pool: Pool) -> None:
        """Leave nobody of a tier more in hand than rounds could have given it by the weights there are now."""
        accounts = [channel.account(pool) for channel in tier if channel.asks(pool)]
        lightest = min((account.quantum_block_ns for account in accounts), default=1)
        self.begin()
        capacity_blocks = sum(
            worker.shape.capacity_blocks for group in pool.groups for worker in group.workers.values()
        )
        # As if all were claimed: what a large head has saved up while it is not stays.
        most_rounds = self._longest.of_ns(pool) * capacity_blocks // lightest
        for account in accounts:
            most_block_ns = most_rounds * account.quantum_block_ns
            account.deficit_block_ns = min(account.deficit_block_ns, most_block_ns)
            for deposit in self._deposits.of_account(account):
                deposit.since_block_ns = min(deposit.since_block_ns, most_block_ns - account.gained_block_ns)

    def _most_rounds(self, pool: Pool, groups: Iterable[Group], lightest_block_ns: int) -> int:
        """Return the rounds after which who waits for workers of the `groups` has as much in hand as it could use.

        A round gives the lightest of those that take turns there `lightest_block_ns`.
        """
        return self._longest.of_ns(pool) * sum(map(self._claimed_blocks, groups)) // lightest_block_ns

    def _by_workers(self, accounts: list[Account]) -> list[tuple[set[Group], list[Account]]]:
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

    def _claimed_blocks(self, group: Group) -> int:
        """Return what is held and saved for on all workers of a group, by what is charged for that."""
        claimed = self._blocks.get(group)
        if claimed is None:
            claimed = 0
            for worker in group.workers.values():
                claimed += worker.charged_blocks(worker.ledger.held_blocks, worker.ledger.sequences)
                if (saving := self._savings.on(worker)) is not None:
                    claimed += saving.charged_blocks
            self._blocks[group] = claimed
        return claimed
