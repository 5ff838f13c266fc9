"""Requests that come back to the front of their line, as their attempts failed, are passed by nobody behind them."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.line import order
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, announced, shape

CHANNELS = ("a", "b", "c")
STEPS = 150


class Runs(NamedTuple):
    """One that was granted, until when."""

    grant: m.Grant
    until: int


class World:
    """Three workers, three channels that ask for more than there is, and attempts that fail."""

    def __init__(self, choose: random.Random) -> None:
        """Begin with nothing asked."""
        self.choose = choose
        self.rig = Rig({name: Share() for name in CHANNELS})
        for number in range(3):
            self.rig.open(f"w{number}", shape(choose.choice([60, 100])))
        self.requests: dict[str, m.Announced] = {}
        self.running: list[Runs] = []

    def advance(self, step: int) -> None:
        """End what is to end, and ask for more."""
        self.rig.wait(1000)
        for one in [one for one in self.running if one.until <= step]:
            self.running.remove(one)
            self.tell(step, m.Gone(one.grant.request_id, m.GoneReason.CLAIMED))
            failed = self.choose.random() < 0.3
            cause = m.ReleaseCause.FAILED if failed else m.ReleaseCause.COMPLETED
            epoch, name = one.grant.epoch, one.grant.request_id
            self.tell(step, m.CompletionAck(epoch, epoch, name, 10**6, cause))
            if failed:
                old = self.requests[name]
                self.ask(step, name, old.channel, old.prompt_tokens, old.position, attempt=old.attempt + 1)
        for channel in CHANNELS:
            if self.choose.random() < 0.5:
                position = len(self.requests) + 1
                self.ask(step, f"r{position}", channel, self.choose.choice([5, 50, 60, 90]), position)

    def ask(self, step: int, name: str, channel: str, blocks: int, position: int, attempt: int = 1) -> None:
        """Announce a request."""
        self.requests[name] = announced(name, channel, blocks, position, attempt=attempt)
        self.tell(step, self.requests[name])

    def tell(self, step: int, message: m.Input) -> None:
        """Feed a message, and look at what is granted at once: whom it passes."""
        before, count = self.savers(), len(self.rig.grants)
        self.rig.tell(message)
        booked = before | self.savers()
        for grant in self.rig.grants[count:]:
            lines = self.rig.machine.channel(grant.channel).lines.values()
            head = min([entry for line in lines for entry in line.entries()], key=order, default=None)
            worker = self.rig.machine.fleet.get(grant.epoch)
            assert worker is not None
            passes = head is not None and head.announced.position < self.requests[grant.request_id].position
            if head is not None and passes and head.request_id not in booked:
                assert worker.shape.capacity_blocks < head.announced.prompt_tokens, f"{grant.request_id} passes it"
            self.running.append(Runs(grant, step + self.choose.randint(2, 12)))

    def savers(self) -> set[str]:
        """Return those with a booked start."""
        return {saving.entry.request_id for saving in self.rig.machine._arbiter._savings}


@given(st.integers(0, 10**6))
def test_a_head_that_comes_back_is_passed_only_with_a_booked_start(seed: int) -> None:
    """One behind it that saves starts no sooner for that, where a worker could hold both."""
    world = World(random.Random(seed))
    for step in range(STEPS):
        world.advance(step)
    world.rig.check()
