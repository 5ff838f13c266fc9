"""Nothing that is paid for a turn is lost, nor given to anybody else, whatever comes, goes and is asked for."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.books import Books, kept_books
from tests.support.scheduling import Rig, shape

MODELS = ("x", "y", "z")
SHARES = {"one": Share(), "two": Share(4.0), "three": Share(1.0, 0.2), "low": Share(1.0, 0.0, 0.7, tier=1)}


class Play:
    """A fleet whose workers come and go and link models, and channels that ask for some of them, or for any."""

    def __init__(self, draw: random.Random, books: Books) -> None:
        self.draw = draw
        self.books = books
        self.rig = Rig(SHARES, draw.choice(["virtual-channels", "predictive"]))
        self.running: list[m.Grant] = []
        self.epochs: list[int] = []
        for _ in range(draw.randint(1, 4)):
            self.open()

    def open(self) -> None:
        """Open a worker of one to three models."""
        model, *aliases = self.draw.sample(MODELS, self.draw.choice([1, 1, 2, 3]))
        engine = shape(self.draw.choice([40, 100]))
        worker_id = f"w{len(self.rig.effects)}-{self.draw.random()}"
        self.epochs.append(self.rig.open(worker_id, engine, model=model, aliases=tuple(aliases)))

    def close(self) -> None:
        """Lose a worker; what ran there is lost with it."""
        epoch = self.epochs.pop(self.draw.randrange(len(self.epochs)))
        self.running = [grant for grant in self.running if grant.epoch != epoch]
        self.rig.tell(m.WorkerClosed(epoch))
        self.rig.wait(6_000)  # its grace
        self.rig.tell(m.Tick())

    def reopen(self) -> None:
        """Let a worker's stream break and come back, without some of what it held."""
        epoch = self.draw.choice(self.epochs)
        worker = self.rig.machine.fleet.get(epoch)
        assert worker is not None
        held = [grant for grant in self.running if grant.epoch == epoch and self.draw.random() < 0.7]
        self.running = [grant for grant in self.running if grant.epoch != epoch]
        blocks = [self.draw.randint(1, grant.booked_blocks) for grant in held]
        seq = self.rig.position * 1_000
        inventory = [
            m.Holding(grant.request_id, grant.channel, booked, seq) for grant, booked in zip(held, blocks, strict=True)
        ]
        model, *aliases = worker.models if self.draw.random() < 0.8 else self.draw.sample(MODELS, 2)
        self.epochs.remove(epoch)
        self.epochs.append(self.rig.open(worker.worker_id, worker.shape, inventory, model, aliases=tuple(aliases)))
        self.running += [grant.replace(epoch=self.epochs[-1]) for grant in held]

    def ask(self) -> None:
        """Announce a few requests."""
        for _ in range(self.draw.randint(1, 6)):
            model = self.draw.choice(("", *MODELS))
            self.rig.announce(self.draw.choice(list(SHARES)), self.draw.choice([1, 5, 20, 30, 60]), model=model)

    def cancel(self) -> None:
        """Take back one of those that wait, more likely one that has paid."""
        arbiter = self.rig.machine._arbiter
        paid = [saving.entry.request_id for saving in arbiter._savings] + list(arbiter._deposits._by_request)
        if paid:
            self.rig.tell(m.Gone(self.draw.choice(paid), m.GoneReason.ENDED))

    def end(self) -> None:
        """Let some of what runs tell what it holds, return unclaimed or end."""
        for grant in self.draw.sample(self.running, min(len(self.running), self.draw.randint(1, 4))):
            what = self.draw.random()
            if what < 0.2:
                self.rig.settle(grant, self.draw.randint(1, grant.booked_blocks))
                continue
            self.running.remove(grant)
            if what < 0.3:
                self.rig.release(grant, m.ReleaseCause.UNCLAIMED)
            else:
                self.rig.finish(grant)

    def step(self) -> None:
        """Let something happen, and look at the books."""
        self.rig.wait(self.draw.choice([1, 10, 100, 1_000]))
        choices = [self.ask, self.end, self.cancel, self.open, *([self.close, self.reopen] if self.epochs else [])]
        self.draw.choices(choices, [6, 6, 1, 0.3, 0.3, 0.5][: len(choices)])[0]()
        self.running += self.rig.grants
        self.rig.grants = []
        self.books.audit(self.rig.machine)


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_paid_is_held_spent_or_back_where_it_came_from(seed: int) -> None:
    with kept_books() as books:
        play = Play(random.Random(seed), books)
        for _ in range(150):
            play.step()
