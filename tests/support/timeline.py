"""A scheduler machine over virtual time: requests arrive, hold their blocks for as long as they were made to, and end.

Blocks hold one token (see `scheduling`), so a request books and holds exactly its `blocks`. Everything happens on a
grid of engine steps: what ends in a step and what arrives in it reach the machine together, as one wake-up.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.scheduler.core import messages as m
from services.scheduler.core.fleet import Worker
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, announced, shape


class Call(NamedTuple):
    """A request: when it arrives, of which channel, how many blocks each of its completions holds and for how many
    steps, its model, and how many completions it asks for.
    """

    step: int
    channel: str
    blocks: int
    steps: int
    model: str = ""
    completions: int = 1


class Timeline:
    """Plays calls on workers of the given capacities. `speeds` divides how long a request takes on each.

    `engines` are a model, its other names behind blanks, and how many completions run at once, for each worker.
    """

    def __init__(
        self,
        shares: Mapping[str, Share],
        capacities: Iterable[int],
        speeds: Iterable[float] = (),
        policy: str = "virtual-channels",
        step_ms: int = 10,
        engines: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Open the workers `w0`, `w1` ..."""
        self.rig = Rig(shares, policy)
        self.step_ms = step_ms
        self.step = 0
        self.speeds: dict[int, float] = {}
        self.calls: dict[str, Call] = {}
        self.granted_at: dict[str, int] = {}
        self.ended_at: dict[str, int] = {}
        self.head_since: dict[str, int] = {}
        self.block_steps: Counter[str] = Counter()
        self._ends: list[tuple[int, int, m.Grant]] = []
        speeds, engines = list(speeds), list(engines)
        for number, capacity in enumerate(capacities):
            names, sequences = engines[number] if engines else ("m", 10_000)
            model, *aliases = names.split()
            epoch = self.rig.open(f"w{number}", shape(capacity, sequences), model=model, aliases=tuple(aliases))
            self.speeds[epoch] = speeds[number] if speeds else 1.0

    def advance(self, calls: Iterable[Call] = ()) -> None:
        """Let one step pass: what ends then ends, `calls` arrive, and what fits is granted."""
        for worker in self.workers:
            self.block_steps.update(worker.ledger.held_by_channel())
        self.rig.wait(self.step_ms)
        self.step += 1
        messages: list[m.Input] = []
        while self._ends and self._ends[0][0] <= self.step:
            _, seq, grant = heapq.heappop(self._ends)
            self.ended_at[grant.request_id] = self.step
            cause = m.ReleaseCause.COMPLETED
            messages.append(m.CompletionAck(grant.epoch, grant.epoch, grant.request_id, seq, cause))
        for call in calls:
            name = f"{call.channel}-{len(self.calls)}"
            self.calls[name] = call
            wanted: dict[str, object] = {"model": call.model, "n": call.completions}
            messages.append(announced(name, call.channel, call.blocks, len(self.calls), **wanted))
        self.rig.tell(*messages)
        self._start()
        self._see_heads()

    def reopen(self, worker_id: str) -> None:
        """Let a worker's stream break and come back, with all it holds."""
        old = self.rig.worker(worker_id)
        held = [grant for _, _, grant in self._ends if grant.epoch == old.epoch]
        inventory = [
            m.Holding(grant.request_id, grant.channel, grant.booked_blocks, 0, grant.completions) for grant in held
        ]
        model, *aliases = old.models
        self.rig.tell(m.WorkerClosed(old.epoch))
        epoch = self.rig.open(worker_id, old.shape, inventory, model=model, aliases=tuple(aliases))
        self.speeds[epoch] = self.speeds.pop(old.epoch)
        self._ends = [
            (step, order, grant.replace(epoch=epoch) if grant.epoch == old.epoch else grant)
            for step, order, grant in self._ends
        ]
        self._start()

    def _start(self) -> None:
        grants, self.rig.grants = self.rig.grants, []
        for grant in grants:
            self.rig.tell(m.Gone(grant.request_id, m.GoneReason.CLAIMED))
            self.granted_at[grant.request_id] = self.step
            steps = max(round(self.calls[grant.request_id].steps / self.speeds[grant.epoch]), 1)
            heapq.heappush(self._ends, (self.step + steps, len(self.granted_at), grant))

    def _see_heads(self) -> None:
        for name in self.rig.machine.shares:
            for _line, head in self.rig.machine.channel(name).heads():
                self.head_since.setdefault(head.request_id, self.step)

    @property
    def workers(self) -> list[Worker]:
        """The workers in the order of their names."""
        return list(self.rig.machine.fleet)

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many requests wait, by channel."""
        return self.rig.machine.backlog.waiting

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return len(self.ended_at) < len(self.calls)

    def waits(self, channel: str) -> list[int]:
        """Return the steps that each granted request of the channel has waited, sorted."""
        return sorted(
            at - self.calls[name].step for name, at in self.granted_at.items() if self.calls[name].channel == channel
        )
