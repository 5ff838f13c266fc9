"""What running requests have really occupied, in block-nanoseconds, and what their channels are charged for it.

At the grant a channel is charged an estimate: the blocks booked, for as long as its
requests usually hold theirs. Each ACK corrects it to what has been used so far plus what
is held now for the time that is still expected, and the end to what was used. Blocks are
those that the worker charges for (`Worker.charged_blocks`), which counts sequences too. So
over time a channel pays for exactly what it occupied, whatever it booked and however
wrong the estimate was; in between it is off by no more than its running requests are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.scheduler.core.fleet import Pool, Worker
from services.scheduler.core.messages import ReleaseCause, WorkerOpened
from services.scheduler.core.sharing.channel import Account, Channel
from services.scheduler.core.sharing.hold_time import HoldTime

LEAST_HOLD_NS: Final = 1_000_000
"""What a grant is charged at least: about one step of the fastest engine, so that no grant is free."""


class Hold:
    """One reservation that is charged for: what it holds since when, what it used before, and what was paid for it."""

    __slots__ = (
        "account", "blocks", "charged_blocks", "granted_ns", "paid_block_ns", "ran", "sequences", "since_ns",
        "used_block_ns",
    )  # fmt: skip

    def __init__(
        self, worker: Worker, account: Account, blocks: int, sequences: int, prepaid_block_ns: int, now_ns: int
    ) -> None:
        """Begin a hold of `blocks` and `sequences`, for which nothing but the prepaid is charged yet."""
        self.account = account
        self.granted_ns = now_ns
        self.blocks = blocks
        self.sequences = sequences
        self.charged_blocks = worker.charged_blocks(blocks, sequences)
        self.since_ns = now_ns
        self.used_block_ns = 0
        self.paid_block_ns = prepaid_block_ns
        self.ran = False
        """Whether its prompt was counted or it has completed: what was refused or failed before says no hold time."""

    def use(self, now_ns: int) -> None:
        """Count what has been held since the last change."""
        self.used_block_ns += self.charged_blocks * (now_ns - self.since_ns)
        self.since_ns = now_ns

    def correct(self, charge_block_ns: int) -> None:
        """Let the channel pay the difference to a new charge, or get back what it paid above it.

        Both in full, or a channel whose estimates are wrong both ways would gain.
        """
        if charge_block_ns > self.paid_block_ns:
            self.account.pay(charge_block_ns - self.paid_block_ns)
        elif charge_block_ns < self.paid_block_ns:
            self.account.refund(self.paid_block_ns - charge_block_ns)
        self.paid_block_ns = charge_block_ns


class Held:
    """What holds of one account on one worker are together."""

    __slots__ = ("blocks", "sequences")

    def __init__(self) -> None:
        """Begin with none."""
        self.blocks = 0
        self.sequences = 0


class Holds:
    """The holds of every epoch by request."""

    def __init__(self) -> None:
        """Start with no hold."""
        self._by_epoch: dict[int, dict[str, Hold]] = {}
        self._held: dict[int, dict[Account, Held]] = {}
        """What they hold in each epoch together, by who is charged for it."""
        self._anywhere = HoldTime()
        self._in_pool: dict[Pool, HoldTime] = {}

    @property
    def known(self) -> bool:
        """Whether any request has ended yet, so that ends can be expected."""
        return self._anywhere.known

    def cost_block_ns(self, account: Account, charged_blocks: int) -> int:
        """Return what a grant that is charged for so many blocks is expected to occupy."""
        return charged_blocks * max(self.usual_of_ns(account), LEAST_HOLD_NS)

    def granted(
        self,
        worker: Worker,
        request_id: str,
        account: Account,
        blocks: int,
        prepaid_block_ns: int,
        now_ns: int,
        sequences: int = 1,
    ) -> None:
        """Begin a hold and charge it; `prepaid_block_ns` were paid already."""
        hold = Hold(worker, account, blocks, sequences, prepaid_block_ns, now_ns)
        self._by_epoch.setdefault(worker.epoch, {})[request_id] = hold
        self._add(worker.epoch, account, blocks, sequences)
        account.running += 1
        account.last_charge_block_ns = self.cost_block_ns(account, hold.charged_blocks)
        hold.correct(account.last_charge_block_ns)

    def changed(self, worker: Worker, request_id: str, blocks: int, now_ns: int) -> Channel | None:
        """Note that the request holds `blocks` from now on; return whom it is charged to if those are more."""
        hold = self._by_epoch.get(worker.epoch, {}).get(request_id)
        if hold is None:
            return None
        hold.use(now_ns)
        hold.ran = True
        grew = blocks > hold.blocks
        if blocks != hold.blocks:
            self._add(worker.epoch, hold.account, blocks - hold.blocks, 0)
        hold.blocks = blocks
        hold.charged_blocks = worker.charged_blocks(blocks, hold.sequences)
        left_ns = max(hold.granted_ns + self.usual_of_ns(hold.account) - now_ns, 0)
        hold.correct(max(hold.used_block_ns + hold.charged_blocks * left_ns, hold.charged_blocks * LEAST_HOLD_NS))
        return hold.account.channel if grew else None

    def ended(self, worker: Worker, request_id: str, cause: ReleaseCause, now_ns: int) -> None:
        """End the hold at what it used; one that was returned costs nothing, one that never ran says no hold time."""
        hold = self._by_epoch.get(worker.epoch, {}).pop(request_id, None)
        if hold is None:
            return
        account = hold.account
        account.running -= 1
        self._add(worker.epoch, account, -hold.blocks, -hold.sequences)
        if cause.returned:
            hold.correct(0)
            return
        hold.use(now_ns)
        hold.correct(max(hold.used_block_ns, hold.charged_blocks * LEAST_HOLD_NS))
        if not hold.ran and cause is not ReleaseCause.COMPLETED:
            return
        for time in (account.hold_time, self._in_pool.setdefault(account.pool, HoldTime()), self._anywhere):
            time.observe(now_ns - hold.granted_ns)

    def hand_over(self, before: Worker, opened: WorkerOpened) -> None:
        """Let those go on in another epoch of the same worker that it has brought along; drop the others next."""
        held = self._by_epoch.get(before.epoch, {})
        for holding in opened.inventory:
            if (hold := held.pop(holding.request_id, None)) is not None:
                self._by_epoch.setdefault(opened.epoch, {})[holding.request_id] = hold
                self._add(opened.epoch, hold.account, hold.blocks, hold.sequences)

    def adopted(self, worker: Worker, request_id: str, account: Account, now_ns: int) -> None:
        """Note what a worker has brought along: begin a hold of it now, unless it was handed over."""
        reservation = worker.ledger.reservation(request_id)
        if reservation is None:
            return
        hold = self._by_epoch.get(worker.epoch, {}).get(request_id)
        if hold is None:
            self.granted(worker, request_id, account, reservation.held_blocks, 0, now_ns, reservation.sequences)
        elif hold.blocks != reservation.held_blocks:
            self.changed(worker, request_id, reservation.held_blocks, now_ns)

    def drop(self, worker: Worker, now_ns: int) -> None:
        """End all holds of an epoch, which is no longer in the fleet, at what they used."""
        self._held.pop(worker.epoch, None)
        for hold in self._by_epoch.pop(worker.epoch, {}).values():
            hold.account.running -= 1
            hold.use(now_ns)
            hold.correct(hold.used_block_ns)
        self._in_pool = {pool: time for pool, time in self._in_pool.items() if pool.present or pool.may_return}

    def count(self, worker: Worker) -> int:
        """Return how many holds the worker has."""
        return len(self._by_epoch.get(worker.epoch, ()))

    def expected_ns(self, worker: Worker, blocks: int, sequences: int = 0) -> int:
        """Return how long it takes until so much has come home, if it does in a steady flow for each account.

        By Little's law what requests of one account hold has come home once in their mean hold time. That of all ends
        together would say little: many short ones of few blocks outnumber those that hold nearly everything.
        """
        held = [
            (max(self.usual_of_ns(account), LEAST_HOLD_NS), of_it)
            for account, of_it in self._held.get(worker.epoch, {}).items()
        ]
        longest_ns = self.longest_on_ns(worker)
        return max(
            _home_ns(blocks, sorted((time_ns, of_it.blocks) for time_ns, of_it in held), longest_ns),
            _home_ns(sequences, sorted((time_ns, of_it.sequences) for time_ns, of_it in held), longest_ns),
        )

    def expected_ends(self, worker: Worker, now_ns: int) -> list[tuple[int, int, int]]:
        """Return when each hold is expected to end, one that is late now, soonest first, and what blocks and sequences
        it frees.
        """
        holds = self._by_epoch.get(worker.epoch, {}).values()
        return sorted(
            (max(hold.granted_ns + self.usual_of_ns(hold.account), now_ns), hold.blocks, hold.sequences)
            for hold in holds
        )

    def longest_on_ns(self, worker: Worker) -> int:
        """Return the longest usual hold time of those who hold anything of the worker."""
        return self.longest_ns(self._held.get(worker.epoch, ()))

    def _add(self, epoch: int, account: Account, blocks: int, sequences: int) -> None:
        """Count what is held from now on, or less."""
        by_account = self._held.setdefault(epoch, {})
        held = by_account.get(account)
        if held is None:
            held = by_account[account] = Held()
        held.blocks += blocks
        held.sequences += sequences
        if not held.blocks and not held.sequences:
            del by_account[account]

    def longest_ns(self, accounts: Iterable[Account]) -> int:
        """Return the longest of their usual hold times; nothing while none is known, and of nobody."""
        return max(map(self.usual_of_ns, accounts), default=0)

    def usual_of_ns(self, account: Account) -> int:
        """Return how long requests of a channel usually hold their blocks in a pool; nothing while none has ended.

        Before one of its own has ended there, those of others there say it, or those of other pools.
        What is charged too little is owed in the end. What is charged too much comes back as turns in hand, for which
        a channel that comes meanwhile waits: a guess that is too long would let the first to come go on alone.
        """
        time = account.hold_time
        if not time.known:
            time = self._in_pool.get(account.pool, self._anywhere)
        return time.mean_ns if time.known else 0


def _home_ns(missing: int, held: list[tuple[int, int]], longest_ns: int) -> int:
    """Return when so much has come home of what is `held`, each for a time, shortest first; `longest_ns` if less is."""
    if missing <= 0:
        return 0
    per_ns = sum(of_it / time_ns for time_ns, of_it in held)
    for time_ns, of_it in held:
        if missing <= per_ns * time_ns:
            return int(missing / per_ns)
        missing -= of_it
        per_ns -= of_it / time_ns
    return longest_ns
