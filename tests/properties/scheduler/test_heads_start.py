"""Every request starts within a bound, however channels share: guarantees, ceilings, weights, completions, models."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import Rig, shape

STEPS = 1_500
MOST_STEPS = 1_200
"""What no request has waited for in thousands of runs; one that starves waits to the end. They hold their blocks for 2
to 12 steps."""

CAPACITY_BLOCKS = 100
WAITING = 6
"""Of each channel and model, at any time: the workers are never short of work."""


@st.composite
def shares(draw: st.DrawFn) -> dict[str, Share]:
    """Channels of one tier whose guarantees are not more than a worker."""
    found: dict[str, Share] = {}
    left = 1.0
    for number in range(draw(st.integers(1, 4))):
        guaranteed = draw(st.sampled_from([share for share in (0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5) if share <= left]))
        left = round(left - guaranteed, 6)
        ceiling = draw(st.sampled_from([1.0, 1.0, 1.0, 0.6]))
        found[f"channel-{number}"] = Share(draw(st.sampled_from([0.25, 1.0, 4.0])), guaranteed, ceiling)
    return found


class Load:
    """Requests that come as others start, mostly small, some of nearly a worker, some of many completions."""

    def __init__(
        self,
        rig: Rig,
        channels: list[str],
        models: list[str],
        sequences: int,
        last_share: float,
        draw: random.Random,
    ) -> None:
        self.rig, self.draw, self.sequences, self.last_share = rig, draw, sequences, last_share
        self.places = [(channel, model) for channel in channels for model in models]
        self.waiting: dict[str, tuple[tuple[str, str], int]] = {}
        self.running: dict[str, tuple[int, m.Grant]] = {}
        self.seen = 0
        self.longest = 0

    def step(self, step: int) -> None:
        """Fill the lines, take the grants, and end what is over."""
        for place in self.places:
            for _ in range(WAITING - sum(other == place for other, _ in self.waiting.values())):
                self._ask(place, step)
        self.rig.wait(50)
        self._take(step)
        for request_id in [name for name, (ends, _) in self.running.items() if ends <= step]:
            self.rig.finish(self.running.pop(request_id)[1])
        self._take(step)
        self.longest = max([self.longest, *(step - since for _, since in self.waiting.values())])

    def _ask(self, place: tuple[str, str], step: int) -> None:
        blocks = self.draw.randint(20, 95) if self.draw.random() < 0.05 else self.draw.randint(1, 6)
        completions = 1
        if self.draw.random() < 0.05:
            blocks, completions = 1, self.draw.randint(2, max(min(self.sequences // 2, 8), 2))
        last = self.draw.random() < self.last_share
        (name,) = self.rig.announce(place[0], blocks, model=place[1], n=completions, last_attempt=last)
        self.waiting[name] = (place, step)

    def _take(self, step: int) -> None:
        for grant in self.rig.grants[self.seen :]:
            self.waiting.pop(grant.request_id, None)
            others = [other for _, other in self.running.values() if other.epoch == grant.epoch]
            assert not grant.last_attempt or not any(other.last_attempt for other in others)
            self.running[grant.request_id] = (step + self.draw.randint(2, 12), grant)
        self.seen = len(self.rig.grants)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shares(),
    st.sampled_from(["predictive", "predictive", "virtual-channels"]),
    st.sampled_from([1.0, 1.0, 1.5]),
    st.lists(st.sampled_from(["m", "n"]), min_size=1, max_size=3),
    st.sampled_from([10, 20, 40, 1000]),
    st.booleans(),
    st.sampled_from([0.0, 0.005, 0.01]),
    st.integers(0, 1 << 30),
)
def test_every_head_starts(
    channels: dict[str, Share],
    policy: str,
    slack: float,
    workers: list[str],
    sequences: int,
    guaranteed_first: bool,
    last_share: float,
    seed: int,
) -> None:
    rig = Rig(channels, policy, slack)
    for number, model in enumerate(workers):
        rig.open(f"w{number}", shape(CAPACITY_BLOCKS, sequences), model=model, guaranteed_first=guaranteed_first)
    load = Load(rig, list(channels), sorted(set(workers)), sequences, last_share, random.Random(seed))
    for step in range(STEPS):
        load.step(step)
    rig.check()
    assert load.longest < MOST_STEPS
