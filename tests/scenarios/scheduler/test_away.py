"""What has paid to wait for workers that go away holds up nobody, itself included."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

import pytest

from services.queue.core.lines import Line
from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.flood import Flood
from tests.support.scheduling import Rig, announced, shape
from tests.support.timeline import Call, Timeline

MANY = 1_000
POLICIES = ("virtual-channels", "predictive")
SHARES = {"small": Share(), "large": Share(), "own": Share()}


def paid(timeline: Timeline, model: str) -> list[str]:
    """Return the requests of `own` that have paid to wait for workers of the model."""
    deposits = [deposit for deposit in timeline.rig.machine._arbiter._deposits if model in deposit.account.pool.models]
    return [deposit.entry.request_id for deposit in deposits if deposit.account.channel.name == "own"]


def until_paid(flood: Flood, models: tuple[str, str], own: Call) -> str:
    """Have `small` and `large` fill the workers until a request of `own` has paid for the first's; return its name."""
    timeline, choose = flood.timeline, random.Random(1)
    while not paid(timeline, models[0]):
        assert timeline.step < 200
        calls = [(Call(timeline.step, "small", 5, choose.randint(5, 15), model), 40) for model in models]
        if timeline.step > 20:
            calls.append((Call(timeline.step, "large", 90, 20, models[0]), 2))
        if timeline.step > 25:
            calls.append((own._replace(step=timeline.step), 4 if not own.model else 1))
        flood.advance(*calls)
    return paid(timeline, models[0])[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_other_lines_of_its_channel_save_on_workers_that_are_there(policy: str) -> None:
    """`x` has paid for the first worker, which is drained. `y` saves on the second, which serves both of them too."""
    engines = [("x y", MANY), ("y z", MANY)]
    flood = Flood(Timeline(SHARES, [100, 100], policy=policy, engines=engines))
    until_paid(flood, ("x", "z"), Call(0, "own", 80, 20, "x"))
    timeline, choose = flood.timeline, random.Random(2)
    timeline.rig.tell(m.DrainRequested("w0"))
    timeline._start()
    for step in range(timeline.step, timeline.step + 500):
        flood.advance(
            (Call(step, "small", 5, choose.randint(5, 15), "z"), 40),
            (Call(step, "own", 60, 10, "y"), 1),
        )
    assert flood.granted("own", "y") > 20
    assert flood.longest_wait("own", "y") < 60


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_names_no_model_runs_elsewhere(policy: str) -> None:
    flood = Flood(Timeline(SHARES, [100, 100], policy=policy, engines=[("p", MANY), ("q", MANY)]))
    first = until_paid(flood, ("p", "q"), Call(0, "own", 60, 10))
    timeline, choose = flood.timeline, random.Random(2)
    timeline.rig.tell(m.DrainRequested("w0"))
    timeline._start()
    drained = timeline.step
    for step in range(drained, drained + 100):
        flood.advance(
            (Call(step, "small", 5, choose.randint(5, 15), "q"), 40),
            (Call(step, "own", 60, 10), 4),
        )
    assert timeline.granted_at[first] < drained + 60


class Announcing:
    """One line as the queue keeps it, a scheduler that says how much of it is announced, and what it grants."""

    def __init__(self, policy: str, sizes: Iterable[int]) -> None:
        """Have requests of these sizes wait; there are workers `large` of 100 blocks and `small` of 50."""
        self.rig = Rig({"a": Share()}, policy)
        self.rig.open("large", shape(100, 8), model="m")
        self.rig.open("small", shape(50, 8), model="m")
        self.sizes = list(sizes)
        self.line = Line()
        for number in range(len(self.sizes)):
            self.line.enter(number, 0, "m")
        self.granted: list[int] = []
        self._ends: list[tuple[int, int, m.Grant]] = []
        self._heard(0, self.rig.effects)

    def advance(self, step: int, *messages: m.Input) -> None:
        """Let a step pass in which what is granted runs on, or ends after ten of them."""
        self.rig.wait(10)
        told = list(messages)
        while self._ends and self._ends[0][0] <= step:
            _, seq, grant = heapq.heappop(self._ends)
            cause = m.ReleaseCause.COMPLETED
            told.append(m.CompletionAck(grant.epoch, grant.epoch, grant.request_id, seq, cause))
        while told := [*told, *self._announced()]:
            told = self._heard(step, self.rig.tell(*told))

    def _announced(self) -> list[m.Input]:
        return [announced(str(each), "a", self.sizes[each], each, model="m") for each in self.line.announce()]

    def _heard(self, step: int, effects: Iterable[m.Effect]) -> list[m.Input]:
        claims: list[m.Input] = []
        for effect in effects:
            if isinstance(effect, m.SetWindow):
                self.line.set_served(effect.served)
                self.line.set_limit(effect.limit)
            elif isinstance(effect, m.Grant):
                number = int(effect.request_id)
                self.line.leave(number, "m")
                self.granted.append(number)
                heapq.heappush(self._ends, (step + 10, len(self.granted), effect))
                claims.append(m.Gone(effect.request_id, m.GoneReason.CLAIMED))
        return claims


@pytest.mark.parametrize("policy", POLICIES)
def test_those_behind_more_than_a_window_of_them_are_announced(policy: str) -> None:
    """300 that only the drained worker could hold are first in line, then small ones."""
    queue = Announcing(policy, [80] * 300 + [5] * 200)
    queue.advance(0, m.DrainRequested("large"))
    for step in range(1, 300):
        queue.advance(step, m.Tick())
    assert set(range(300, 500)) <= set(queue.granted)
    queue.advance(300, m.DrainRequested("large", undo=True))
    assert queue.granted[-1] < 300
