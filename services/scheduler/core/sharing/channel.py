"""One virtual channel: its waiting lines, its share of the blocks, and its standing with the arbiter.

Within a channel requests leave by (priority, position). A channel has one line
per model asked for, because requests for different models do not compete for the
same engines: a request that waits for a model nobody serves must not hold up the
others.

What it may take of one pool of workers before others have had their turn it has an `Account` of there, in
**block-nanoseconds**: blocks that are charged for, times how long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Group, Pool, Worker
from services.scheduler.core.sharing.beyond import Beyond, Place
from services.scheduler.core.sharing.hold_time import HoldTime
from services.scheduler.core.sharing.line import Line, order
from services.scheduler.core.sharing.openings import Kind, Openings
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.sharing.widest import AllRooms


class Account:
    """A channel's standing at a pool, in block-nanoseconds.

    Without work there a channel does not save, but it still owes, at most its last charge when it returns.
    """

    __slots__ = (
        "channel", "deficit_block_ns", "gained_block_ns", "hold_time", "last_charge_block_ns", "pool", "running",
    )  # fmt: skip

    def __init__(self, channel: Channel, pool: Pool) -> None:
        """Open it with nothing in hand."""
        self.channel = channel
        self.pool = pool
        self.deficit_block_ns = 0
        self.last_charge_block_ns = 0
        self.gained_block_ns = 0
        """All that rounds have given it."""
        self.hold_time = HoldTime()
        """How long its requests hold blocks there."""
        self.running = 0
        """How many of them do."""

    @property
    def quantum_block_ns(self) -> int:
        """What it gains a round."""
        return self.channel.quantum_block_ns

    @property
    def has_work(self) -> bool:
        """Whether the channel has requests in line that workers of the pool serve."""
        return self.channel.asks(self.pool)

    def returns(self) -> None:
        """Note that the channel has work again.

        It was away: what ran beyond its estimate then kept nobody waiting that this would still be owed to.
        """
        self.deficit_block_ns = max(self.deficit_block_ns, -self.last_charge_block_ns)

    def leaves(self) -> None:
        """Note that the channel has no more work."""
        self.deficit_block_ns = min(self.deficit_block_ns, 0)

    def rounds_to_pay(self, cost_block_ns: int) -> int:
        """Return the rounds it takes until the channel can pay; 0 or less if it can now."""
        return -((self.deficit_block_ns - cost_block_ns) // self.quantum_block_ns)

    @property
    def has_in_hand(self) -> bool:
        """Whether it has another turn in hand: what its last request was charged, and no mere part of a round."""
        return self.deficit_block_ns >= max(self.quantum_block_ns, self.last_charge_block_ns)

    def rounds_until(self, most_block_ns: int) -> int:
        """Return the rounds after which it has so much in hand, and no more."""
        return max((most_block_ns - self.deficit_block_ns) // self.quantum_block_ns, 0)

    def gain(self, rounds: int) -> None:
        """Take the quanta of so many rounds."""
        self.gained_block_ns += rounds * self.quantum_block_ns
        self.deficit_block_ns += rounds * self.quantum_block_ns

    def pay(self, cost_block_ns: int) -> int:
        """Pay and return the cost; what is not in hand is owed."""
        self.deficit_block_ns -= cost_block_ns
        return cost_block_ns

    def refund(self, block_ns: int) -> None:
        """Take back what was paid too much; a channel without work does not save."""
        self.deficit_block_ns += block_ns
        if not self.has_work:
            self.leaves()


class Channel:
    """A channel's lines, its accounts, and where it may find room.

    `changed` tells the arbiter of which models the front of the line is another than at its last pass, `line_ended`
    that a line is empty now. `uncovered` tells it that a look at one pool has made another request without a model the
    first for the other pools, which are to be looked at in the same pass. `moved` are the lines whose first may be
    another than when it was last looked at what is paid for.

    Whoever no present worker could run, a line whose model none serves or a head that only workers that are away can
    hold, or that lower tiers leave no room, is set *aside*: it is not looked at until it is brought back because the
    fleet, or what those tiers hold, has changed. Heads of the two kinds are kept apart: what brings back the one costs
    no look at the other.
    """

    def __init__(self, name: str, share: Share, quantum_block_ns: int) -> None:
        """Make an empty channel that gains `quantum_block_ns` a round."""
        self.name = name
        self.share = share
        self.quantum_block_ns = quantum_block_ns
        self._accounts: dict[Pool, Account] = {}
        self.lines: dict[str, Line] = {}
        self._looked_at: dict[str, Line] = {}
        """Those of the lines that are not aside."""
        self.changed: set[str] = set()
        self.line_ended = False
        self.uncovered = False
        self.moved: dict[Line, None] = {}
        self.rooms = AllRooms(_reach_blocks)
        """Where requests may find room."""
        self.guaranteed_rooms = AllRooms(self._rest_of_guarantee)
        """Where requests may go first: workers by what is left of the guarantee."""
        self._waiting = 0
        self.beyond = Beyond()
        """Who is aside because only workers that are away could hold it."""
        self._below: dict[Line, dict[str, Entry]] = {}
        """Who is aside for lower tiers."""
        self.kept_out: dict[Group, dict[int, int]] = {}
        """Where heads are aside for lower tiers, with the least blocks that any of so many completions needs."""
        self.grown: set[Worker] = set()
        """Workers where lower tiers may leave those more room than when that was last looked at."""
        self.brought_back_ns = 0
        """When all of those were last brought back."""

    def __len__(self) -> int:
        """Return the number of requests waiting."""
        return self._waiting

    # ---- lines ----

    def __contains__(self, entry: Entry) -> bool:
        """Return whether the announced entry is in its line."""
        line = self.lines.get(entry.announced.model)
        return line is not None and entry in line

    def enter(self, entry: Entry) -> None:
        """Put an announced entry into its line."""
        model = entry.announced.model
        line = self.lines.get(model)
        if line is None:
            for account in self._accounts_for(model):
                if not account.has_work:
                    account.returns()
            line = self.lines[model] = self._looked_at[model] = Line(model)
        if line.enter(entry):
            self.changed.add(model)
            self.moved[line] = None
        self._waiting += 1

    def leave(self, entry: Entry) -> None:
        """Take an entry out of its line."""
        line = self.lines[entry.announced.model]
        if line.leave(entry):
            self.changed.add(line.model)
            self.moved[line] = None
        else:
            self._forget_aside(line, entry)
        if entry.announced.last_attempt:
            self._let_next_last(line, entry)
        self._waiting -= 1
        if line:
            return
        del self.lines[line.model]
        self._looked_at.pop(line.model, None)
        self.changed.add(line.model)
        self.moved[line] = None
        self.line_ended = True
        for account in self._accounts_for(line.model):
            if not account.has_work:
                account.leaves()

    def stepped_back(self, line: Line) -> None:
        """Note that one of the line has its payment back: without a model it may be the first in other pools."""
        self.moved[line] = None
        self.changed.add(line.model)

    def _forget_aside(self, line: Line, entry: Entry) -> None:
        self.beyond.discard(entry)
        below = self._below.get(line)
        if below is not None and below.pop(entry.request_id, None) is not None and not below:
            del self._below[line]

    def _accounts_for(self, model: str) -> list[Account]:
        return [account for pool, account in self._accounts.items() if pool.serves(model)]

    def heads(self, pool: Pool | None = None) -> list[tuple[Line, Entry]]:
        """Return each line that is looked at with its head, in the order in which the heads would leave.

        Of those alone that the pool serves, if one is given.
        """
        looked_at = self._looked_at.values() if pool is None else self._looked_at_in(pool)
        found = [(line, head) for line in looked_at if (head := line.head()) is not None]
        if len(found) > 1:
            found.sort(key=lambda pair: order(pair[1]))
        return found

    def _looked_at_in(self, pool: Pool) -> list[Line]:
        if len(pool.models) < len(self._looked_at):
            return [line for model in pool.models if (line := self._looked_at.get(model)) is not None]
        return [line for model, line in self._looked_at.items() if model in pool.models]

    def heads_for(self, models: tuple[str, ...]) -> Iterator[Entry]:
        """Yield the heads, those that are not aside, which a worker answering to `models` could serve."""
        for model, line in self._looked_at.items():
            if (not model or model in models) and (head := line.head()) is not None:
                yield head

    def set_unserved_aside(self, serving: Callable[[str], list[Group]]) -> None:
        """Look no longer at lines for models that no group is `serving`."""
        for model in [model for model in self._looked_at if not serving(model)]:
            del self._looked_at[model]

    def set_head_aside(self, line: Line, needed_blocks: dict[Group, int] | None, for_last: bool = False) -> None:
        """Let the one behind the line's head have its turn.

        It waits for a worker that has what it needs in one of the groups; None if lower tiers keep it out. If it waits
        `for_last`, for a worker without another on its last attempt, the next such would in vain.
        """
        entry = line.set_head_aside()
        if not for_last:
            self._let_next_last(line, entry)
        if needed_blocks is None:
            self._below.setdefault(line, {})[entry.request_id] = entry
        else:
            self.beyond.add(line, entry, needed_blocks)
        self.moved[line] = None
        self.uncover(line)
        if line.head() is None:
            self.line_ended = True
            self.changed.add(line.model)

    def _let_next_last(self, line: Line, entry: Entry) -> None:
        if line.let_next_last(entry):
            self.changed.add(line.model)
            self.moved[line] = None

    def waits_for_last(self, pool: Pool) -> bool:
        """Return whether one is aside for a worker of the pool without another on its last attempt.

        It gains by rounds meanwhile, or whoever had more in hand would have that place for ever.
        """
        return self.beyond.last_attempts > 0 and any(line.last_is_aside for line in self._looked_at_in(pool))

    def uncover(self, line: Line) -> None:
        """Note that a look at one pool had its first set aside or pay: without a model another is first elsewhere."""
        self.uncovered |= not line.model

    def below(self, line: Line) -> int:
        """Return how many of the line are aside for lower tiers."""
        return len(self._below.get(line, ()))

    def has_turn(self, line: Line) -> bool:
        """Return whether any of the line waits for room, and not only for workers that are away."""
        return line.head() is not None or line in self._below

    def note_kept_out(self, needed_blocks: dict[Group, int], completions: int) -> None:
        """Note where lower tiers leave a head no room, and what it needs there."""
        for group, blocks in needed_blocks.items():
            least = self.kept_out.setdefault(group, {})
            least[completions] = min(least.get(completions, blocks), blocks)

    def bring_back(self, group: Group) -> None:
        """Look again at every line that workers of the group may serve, and at whom lower tiers keep out of it."""
        self.kept_out.pop(group, None)
        for model in ("", *group.models):
            line = self.lines.get(model)
            if line is not None:
                self._looked_at[model] = line
                if below := self._below.pop(line, None):
                    self.moved[line] = None
                    for entry in below.values():
                        line.bring_back(entry)

    def reach_grew(self, worker: Worker) -> None:
        """Bring back whom the worker could hold, as it takes grants again."""
        self.bring_back_from_beyond(self.beyond.take_within(worker.group, worker.shape.capacity_blocks))

    def look_again_at_lasts(self) -> None:
        """Look again at those on their last attempt, as a worker takes no grants any more.

        One that waited for it to have none other waits for it to be back, and is in the way of those behind it no more.
        """
        self.bring_back_from_beyond(self.beyond.take_last_attempts())

    def bring_back_from_beyond(self, places: Iterable[Place]) -> None:
        """Look again at those that were taken out of `beyond`."""
        for line, entry in places:
            line.bring_back(entry)
            self.moved[line] = None
            self.changed.add(line.model)

    # ---- standing ----

    def account(self, pool: Pool) -> Account:
        """Return its standing at a pool, a new one if it has none there."""
        account = self._accounts.get(pool)
        if account is None:
            account = self._accounts[pool] = Account(self, pool)
        return account

    def account_if_any(self, pool: Pool) -> Account | None:
        """Return its standing at a pool, None if it has none there."""
        return self._accounts.get(pool)

    def asks(self, pool: Pool) -> bool:
        """Return whether it has requests in line that the pool serves."""
        if len(pool.models) < len(self.lines):
            return any(model in self.lines for model in pool.models)
        return any(model in pool.models for model in self.lines)

    def close_accounts(self) -> None:
        """Forget its standing at pools that are gone."""
        self._accounts = {pool: account for pool, account in self._accounts.items() if pool.present or pool.may_return}

    # ---- room ----

    def openings(self, group: Group, kind: Kind) -> Openings:
        """Return where in the group requests of a kind may find room."""
        return self.rooms.openings(group, kind)

    def _rest_of_guarantee(self, worker: Worker) -> int:
        if not worker.displaces:
            return 0
        return self.share.guaranteed_blocks(worker.shape.capacity_blocks) - worker.ledger.held_by(self.name)

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room for this channel than it had."""
        self.rooms.room_grew(worker)
        self.guaranteed_rooms.room_grew(worker)

    def worker_left(self, worker: Worker) -> None:
        """Forget the worker."""
        self.grown.discard(worker)
        self.rooms.worker_left(worker)
        self.guaranteed_rooms.worker_left(worker)


def _reach_blocks(worker: Worker) -> int:
    return worker.reach_blocks
