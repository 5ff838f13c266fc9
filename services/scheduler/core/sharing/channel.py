"""One virtual channel: its waiting lines, its share of the blocks, and its standing with the arbiter.

Within a channel requests leave by (priority, position). A channel has one line
per model asked for, because requests for different models do not compete for the
same engines: a request that waits for a model nobody serves must not hold up the
others.

What a channel takes is counted in **block-nanoseconds**: blocks held, times how
long. The deficit is what it may still take before the others have had their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.scheduler.core.backlog import Entry
from services.scheduler.core.fleet import Group, Worker
from services.scheduler.core.sharing.hold_time import HoldTime
from services.scheduler.core.sharing.line import Line, order
from services.scheduler.core.sharing.openings import Kind, Openings, Rooms
from services.scheduler.core.sharing.share import Share


class Channel:
    """A channel's lines, its deficit, what is known of how long its requests hold blocks, and where it may find room.

    `changed` tells the arbiter that the front of a line is another than at its last pass, `line_ended` that a line is
    empty now. An empty channel does not save, but it still owes, at most its last charge when it returns.

    Whoever no present worker could run, a line whose model none serves or a head that only workers that are away can
    hold, or that lower tiers leave no room, is set *aside*: it is not looked at until it is brought back because the
    fleet, or what those tiers hold, has changed.
    """

    def __init__(self, name: str, share: Share, quantum_block_ns: int) -> None:
        """Make an empty channel that gains `quantum_block_ns` a round."""
        self.name = name
        self.share = share
        self.quantum_block_ns = quantum_block_ns
        self.deficit_block_ns = 0
        self.last_charge_block_ns = 0
        self.gained_block_ns = 0
        """All that rounds have given it, or would have."""
        self.unpaid_block_ns = 0
        """What it was lent beyond what it ever pays, less what rounds of loans gave it: how far it is from its turn to
        borrow, beside the deficit."""
        self.hold_time = HoldTime()
        self.lines: dict[str, Line] = {}
        self._looked_at: dict[str, Line] = {}
        """Those of the lines that are not aside."""
        self.changed = False
        self.line_ended = False
        self._rooms: dict[Group, Rooms] = {}
        self._guaranteed: dict[Group, Rooms] = {}
        self._waiting = 0
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
            line = self.lines[model] = self._looked_at[model] = Line(model)
        if line.enter(entry):
            self.changed = True
        if not self._waiting:
            # It was away: what ran beyond its estimate then kept nobody waiting that this would still be owed to.
            self.deficit_block_ns = max(self.deficit_block_ns, -self.last_charge_block_ns)
            self.unpaid_block_ns = 0
        self._waiting += 1

    def leave(self, entry: Entry) -> None:
        """Take an entry out of its line."""
        line = self.lines[entry.announced.model]
        if line.leave(entry):
            self.changed = True
        self._waiting -= 1
        if not line:
            del self.lines[line.model]
            self._looked_at.pop(line.model, None)
            self.line_ended = True
        if not self._waiting:
            self.deficit_block_ns = min(self.deficit_block_ns, 0)

    def heads(self) -> list[tuple[Line, Entry]]:
        """Return each line that is looked at with its head, in the order in which the heads would leave."""
        found = [(line, head) for line in self._looked_at.values() if (head := line.head()) is not None]
        if len(found) > 1:
            found.sort(key=lambda pair: order(pair[1]))
        return found

    def heads_for(self, models: tuple[str, ...]) -> Iterator[Entry]:
        """Yield the heads, those that are not aside, which a worker answering to `models` could serve."""
        for model, line in self._looked_at.items():
            if (not model or model in models) and (head := line.head()) is not None:
                yield head

    def set_unserved_aside(self, serving: Callable[[str], list[Group]]) -> None:
        """Look no longer at lines for models that no group is `serving`."""
        for model in [model for model in self._looked_at if not serving(model)]:
            del self._looked_at[model]

    def set_head_aside(self, line: Line) -> None:
        """Let the one behind the line's head have its turn."""
        line.set_head_aside()
        self.line_ended |= line.head() is None

    def note_kept_out(self, needed_blocks: dict[Group, int], completions: int) -> None:
        """Note where lower tiers leave a head no room, and what it needs there."""
        for group, blocks in needed_blocks.items():
            least = self.kept_out.setdefault(group, {})
            least[completions] = min(least.get(completions, blocks), blocks)

    def bring_back(self, group: Group) -> None:
        """Look again at every line and entry that workers of the group may serve."""
        self.kept_out.pop(group, None)
        for model in ("", *group.models):
            line = self.lines.get(model)
            if line is not None:
                self._looked_at[model] = line
                line.bring_back()

    # ---- standing ----

    def rounds_to_pay(self, cost_block_ns: int) -> int:
        """Return the rounds it takes until the channel can pay; 0 or less if it can now."""
        return -((self.deficit_block_ns - cost_block_ns) // self.quantum_block_ns)

    def gain(self, rounds: int, most_block_ns: int | None = None) -> None:
        """Take the quanta of so many rounds; if `most_block_ns` is given, up to that."""
        self.gained_block_ns += rounds * self.quantum_block_ns
        before = self.deficit_block_ns
        after = before + rounds * self.quantum_block_ns
        self.deficit_block_ns = after if most_block_ns is None else max(min(after, most_block_ns), before)

    def pay(self, cost_block_ns: int, most_debt_block_ns: int | None = None) -> int:
        """Pay and return what was paid: beyond a debt of `most_debt_block_ns`, if given, the rest is forgiven."""
        before = self.deficit_block_ns
        after = before - cost_block_ns
        self.deficit_block_ns = after if most_debt_block_ns is None else max(after, min(before, -most_debt_block_ns))
        return before - self.deficit_block_ns

    def refund(self, block_ns: int) -> None:
        """Take back what was paid too much; a channel without work does not save."""
        self.deficit_block_ns += block_ns
        if not self._waiting:
            self.deficit_block_ns = min(self.deficit_block_ns, 0)

    # ---- room ----

    def openings(self, group: Group, kind: Kind) -> Openings:
        """Return where in the group requests of a kind may find room."""
        found = self._rooms.get(group)
        if found is None:
            found = self._rooms[group] = Rooms(group, _reach_blocks)
        return found.of(kind)

    def guaranteed(self, group: Group, kind: Kind) -> Openings:
        """Return where in the group requests of a kind may go first: workers by what is left of the guarantee."""
        found = self._guaranteed.get(group)
        if found is None:
            found = self._guaranteed[group] = Rooms(group, self._rest_of_guarantee)
        return found.of(kind)

    def _rest_of_guarantee(self, worker: Worker) -> int:
        if not worker.displaces:
            return 0
        return self.share.guaranteed_blocks(worker.shape.capacity_blocks) - worker.ledger.held_by(self.name)

    def room_grew(self, worker: Worker) -> None:
        """Note that the worker may have more room for this channel than it had."""
        for rooms in (self._rooms, self._guaranteed):
            found = rooms.get(worker.group)
            if found is not None:
                found.room_grew(worker)

    def worker_left(self, worker: Worker) -> None:
        """Forget the worker."""
        self.grown.discard(worker)
        for rooms in (self._rooms, self._guaranteed):
            found = rooms.get(worker.group)
            if found is not None:
                found.remove(worker)
                if not worker.group.workers:
                    del rooms[worker.group]


def _reach_blocks(worker: Worker) -> int:
    return worker.reach_blocks
