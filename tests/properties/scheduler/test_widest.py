"""Groups that are passed over change no decision, and a completion does not look at each of many groups."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.fleet import Group
from services.scheduler.core.sharing.openings import Openings
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.sharing.widest import Widest
from tests.support.effort import examples
from tests.support.modules import COMPILED
from tests.support.scheduling import Rig, shape

pytestmark = pytest.mark.skipif(COMPILED, reason="nothing patches a compiled method")

STEPS = 60
SHARES = st.builds(
    Share,
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([0.0, 0.0, 0.2]),
    st.sampled_from([1.0, 1.0, 0.6]),
    st.sampled_from([0, 0, 1]),
)


class Load:
    """Requests of several sizes, models and channels, on groups of one worker or two that drain, go and come."""

    def __init__(self, rig: Rig, channels: int, draw: random.Random) -> None:
        self.rig, self.draw = rig, draw
        self.channels = [f"c{number}" for number in range(channels)]
        self.groups = draw.randint(2, 7)
        self.apart = draw.random() < 0.3
        self.capacities = draw.choice(((100,), (30, 60, 100), (100, 200)))
        self.workers = draw.randint(self.groups, 2 * self.groups)
        for number in range(self.workers):
            self.open(number)

    def open(self, number: int) -> None:
        """Open a stream of a worker: of adapters of its own, some with another window, or of a model apart."""
        draw, group = self.draw, number % self.groups
        engine = shape(draw.choice(self.capacities), draw.choice((10_000, 8)))
        engine = engine.replace(max_model_len=10_000 - group % 2 * draw.choice((0, 9_900)))
        first = draw.random() < 0.5
        if self.apart and not group:
            self.rig.open(f"w{number}", engine, model="n", guaranteed_first=first)
        else:
            aliases = (f"a{group}", *(("b",) if group % 3 else ()))
            self.rig.open(f"w{number}", engine, aliases=aliases, guaranteed_first=first)

    def step(self) -> None:
        """Let some come, some end, and now and then a worker drain, or go and come again."""
        draw, rig = self.draw, self.rig
        rig.wait(draw.choice((10, 300, 1500)))
        for _ in range(draw.randint(0, 3)):
            sizes = [draw.choice((3, 10, 25, 50, 90, 150)) for _ in range(draw.randint(1, 5))]
            model = draw.choice(("", "m", "m", "b", "n", *(f"a{group}" for group in range(self.groups))))
            rig.announce(
                draw.choice(self.channels),
                *sizes,
                model=model,
                max_tokens=draw.choice((1, 20, 60)),
                n=draw.choice((1, 1, 2)),
                last_attempt=draw.random() < 0.05,
            )
        for _ in range(min(draw.randint(0, 4), len(rig.grants))):
            rig.finish(rig.grants.pop(draw.randrange(len(rig.grants))))
        number, what = draw.randrange(self.workers), draw.random()
        if what < 0.08:
            rig.tell(m.DrainRequested(f"w{number}", undo=draw.random() < 0.5))
        elif what < 0.14:
            if (worker := rig.machine.fleet.named(f"w{number}")) is not None:
                rig.tell(m.WorkerClosed(worker.epoch))
            if draw.random() < 0.5:
                rig.wait(6_000)
                rig.tell(m.Tick())
            self.open(number)


def effects(shares: list[Share], policy: str, seed: int) -> list[m.Effect]:
    """Return all that a scheduler does under a load."""
    rig = Rig({f"c{number}": share for number, share in enumerate(shares)}, policy)
    load = Load(rig, len(shares), random.Random(seed))
    for _ in range(STEPS):
        load.step()
    return rig.effects


def all_groups(widest: Widest, _blocks: int) -> list[Group]:
    return widest._groups


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SHARES, min_size=1, max_size=3), st.sampled_from(["predictive", "virtual-channels"]), st.integers(0))
def test_decisions_are_those_of_a_look_at_every_group(shares: list[Share], policy: str, seed: int) -> None:
    found = effects(shares, policy, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Widest, "may_have_room", all_groups)
        patched.setattr(Places, "_has_no_more", lambda *_: False)
        assert effects(shares, policy, seed) == found


def looks_for_completions(groups: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often any group is looked at for twenty completions, with more waiting than so many groups run."""
    looks = 0
    rig = Rig({"a": Share(), "b": Share()})
    for number in range(groups):
        rig.open(f"w{number}", shape(), aliases=(f"a{number}",))
    for _ in range(groups):
        rig.announce("a", *[20] * 5, model="m")
        rig.announce("b", *[20] * 5)

    def counted(find: Any) -> Any:
        def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal looks
            looks += 1
            return find(*arguments, **named)

        return counting

    with monkeypatch.context() as patched:
        for name in ("most_blocks", "roomiest_first"):
            patched.setattr(Openings, name, counted(getattr(Openings, name)))
        for grant in rig.grants[:20]:
            rig.wait(10)
            rig.finish(grant)
    assert len(rig.grants) > 5 * groups
    return looks


def test_a_completion_looks_at_groups_that_have_grown_and_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = looks_for_completions(8, monkeypatch), looks_for_completions(64, monkeypatch)
    assert many <= 2 * few + 20, "whatever the number of groups"
