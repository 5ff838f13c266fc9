"""What heads are to younger requests is found once for all lines of a channel, and is what a look at all would find."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.entry import Entry
from services.scheduler.core.sharing.channel import Account
from services.scheduler.core.sharing.heads import Heads
from services.scheduler.core.sharing.older import Before, Older
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.modules import COMPILED
from tests.support.scheduling import Rig, shape

pytestmark = pytest.mark.skipif(COMPILED, reason="nothing patches a compiled method")

STEPS = 60
CAPACITIES = (30, 60, 100, 200)
SHARES = st.builds(Share, st.just(1.0), st.just(0.0), st.sampled_from([0.4, 0.6, 0.8]), st.sampled_from([0, 0, 1]))


class Load:
    """Requests of several sizes, models and channels, on workers that drain and come back."""

    def __init__(self, rig: Rig, channels: int, draw: random.Random) -> None:
        self.rig, self.draw = rig, draw
        self.channels = [f"c{number}" for number in range(channels)]
        workers = draw.randint(1, 4)
        for number in range(workers):
            own = tuple(f"m{draw.randrange(6)}" for _ in range(3))
            rig.open(f"w{number}", shape(draw.choice(CAPACITIES)), model="m", aliases=tuple(dict.fromkeys(own)))
        if draw.random() < 0.5:
            rig.open(f"w{workers}", shape(100), model="n", aliases=("n1", "n2"))
        self.workers = [worker.worker_id for worker in rig.machine.fleet]
        self.models = sorted({name for worker in rig.machine.fleet for name in worker.models})

    def step(self) -> None:
        """Let some come, some end, and now and then a worker drain or take grants again."""
        draw, rig = self.draw, self.rig
        rig.wait(draw.choice((10, 300)))
        for _ in range(draw.randint(0, 3)):
            sizes = [draw.choice((3, 10, 25, 50, 90, 150)) for _ in range(draw.randint(1, 3))]
            model = draw.choice(("", *self.models)) if draw.random() < 0.3 else draw.choice(self.models)
            rig.announce(draw.choice(self.channels), *sizes, model=model)
        for _ in range(min(draw.randint(0, 3), len(rig.grants))):
            rig.finish(rig.grants.pop(draw.randrange(len(rig.grants))))
        if draw.random() < 0.1:
            rig.tell(m.DrainRequested(draw.choice(self.workers), undo=draw.random() < 0.5))


def checked(older: Callable[[Heads, Account, list[Entry]], Older]) -> Callable[[Heads, Account, list[Entry]], Older]:
    """Return what compares all that is said of entries with what is found without anything known."""

    def compared(heads: Heads, account: Account, entries: list[Entry]) -> Older:
        found = older(heads, account, entries)
        known, heads._known = heads._known, {}
        anew = older(heads, account, entries)
        heads._known = known
        for entry in entries:
            assert said(found.of(entry)) == said(anew.of(entry))
        return found

    return compared


def said(before: Before) -> object:
    return before.kept._needed_blocks, before.first


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SHARES, min_size=1, max_size=3), st.sampled_from(["predictive", "virtual-channels"]), st.integers(0))
def test_what_is_known_of_older_heads_is_what_looking_at_all_of_them_finds(
    shares: list[Share], policy: str, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Heads, "_older", checked(Heads._older))
        rig = Rig({f"c{number}": share for number, share in enumerate(shares)}, policy)
        load = Load(rig, len(shares), random.Random(seed))
        for _ in range(STEPS):
            load.step()
