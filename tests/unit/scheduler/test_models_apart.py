"""Requests for one model do not hold up those for another in the same channel."""

from __future__ import annotations

import pytest

from services.queue.core.lines import Line
from services.scheduler.core import messages as m
from services.scheduler.core.channel import Share
from tests.support.scheduling import Rig, announced, shape

POLICIES = ["virtual-channels", "predictive"]


class Fed(Rig):
    """A rig whose requests come from the line of a queue, as its windows let them."""

    def __init__(self, policy: str) -> None:
        super().__init__({"batch": Share()}, policy)
        self.line = Line()
        self.models: dict[int, str] = {}
        for effect in self.effects:
            if isinstance(effect, m.SetWindow):
                self.line.set_limit(effect.limit)

    def submit(self, model: str, count: int) -> None:
        for _ in range(count):
            seq = len(self.models) + 1
            self.models[seq] = model
            self.line.enter(seq, 0, model)
        self.feed()

    def feed(self) -> None:
        """Announce what the windows let through, until they let nothing more."""
        while seqs := list(self.line.announce()):
            self.tell(*(announced(f"r{seq}", "batch", 5, seq, model=self.models[seq]) for seq in seqs))

    def finish(self, grant: m.Grant) -> None:
        seq = int(grant.request_id[1:])
        self.line.leave(seq, self.models[seq])
        super().finish(grant)
        self.feed()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backlog_for_one_model_leaves_the_workers_of_another_their_work(policy: str) -> None:
    rig = Fed(policy)
    rig.open("a", shape(max_num_seqs=8), model="a")
    rig.open("b", shape(max_num_seqs=8), model="b")
    rig.submit("a", 20_000)
    rig.submit("b", 10)
    done = 0
    while done < 40:
        rig.wait(100)
        rig.finish(rig.grants[done])
        done += 1
    granted = [rig.models[int(name[1:])] for name in rig.granted]
    assert granted.count("b") == 10
    assert granted.index("b") <= 8
