"""Shares change while requests run and wait: no credit moves, nothing is revoked, the new shares hold from then on."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import SECOND_NS, Rig, shape

CAPACITY = 60
NAMES = ("a", "b", "c")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Share]:
    """Return shares that a configuration may have: guarantees add up to 1 at most, none above its ceiling."""
    names = draw(st.sets(st.sampled_from(NAMES), min_size=1))
    shares = {}
    for name in sorted(names):
        guarantee = draw(st.sampled_from((0.0, 0.0, 0.1, 0.3)))
        ceiling = draw(st.sampled_from((1.0, 1.0, 0.5, 0.3)))
        weight = draw(st.sampled_from((0.01, 1.0, 7.0)))
        shares[name] = Share(weight, guarantee, ceiling, draw(st.integers(0, 1)))
    return shares


def reconfigure(rig: Rig, shares: dict[str, Share]) -> None:
    """Change the shares, check that this alone moves no credit and says nothing, then arbitrate."""
    before = [(w.worker_id, dict(w.ledger.held_by_channel()), w.ledger.free_blocks) for w in rig.machine.fleet]
    waiting = dict(rig.machine.backlog.waiting)
    assert rig.machine.step(m.Reconfigure(shares), rig.now_ns) == []
    assert before == [(w.worker_id, w.ledger.held_by_channel(), w.ledger.free_blocks) for w in rig.machine.fleet]
    assert waiting == rig.machine.backlog.waiting
    rig.tell(m.Tick())


def check_new_grants(rig: Rig) -> None:
    """What was granted since the last look is within the ceilings of now, or its channel's only one there."""
    shares = rig.machine.shares
    for grant in rig.grants:
        ledger = rig.worker(grant.worker_id).ledger
        ceiling = shares.get(grant.channel, Share()).ceiling_blocks(CAPACITY)
        alone = ledger.reservations_by_channel()[grant.channel] == 1
        unlimited = ceiling == CAPACITY
        assert alone or ledger.held_by(grant.channel) <= ceiling + unlimited * ledger.ahead_blocks


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    changes=st.lists(configurations(), min_size=1, max_size=8),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_over_any_reconfigurations_credits_are_conserved_and_all_requests_end(
    seed: int, changes: list[dict[str, Share]], policy: str
) -> None:
    draw = random.Random(seed)
    rig = Rig({"a": Share(), "b": Share(2.0, 0.2)}, policy)
    for worker_id in ("w1", "w2"):
        rig.open(worker_id, shape(CAPACITY))
    running: list[m.Grant] = []
    for step in range(20 * len(changes)):
        rig.grants = []
        if step % 20 == 10:
            reconfigure(rig, changes[step // 20])
        elif draw.random() < 0.5:
            rig.announce(draw.choice(NAMES), *(draw.randint(1, 40) for _ in range(draw.randint(1, 4))))
        elif running:
            rig.wait(draw.randint(1, 500))
            rig.finish(running.pop(draw.randrange(len(running))))
        if POLICIES[policy].channels_apart:
            check_new_grants(rig)
        running += rig.grants
        rig.check()
    while running:
        rig.wait(100)
        rig.grants = []
        rig.finish(running.pop(0))
        running += rig.grants
    assert not any(rig.machine.backlog.waiting.values())
    assert all(worker.ledger.free_blocks == CAPACITY for worker in rig.machine.fleet)
    assert not any(isinstance(effect, m.Recall) for effect in rig.effects)


def held_parts(rig: Rig, running: deque[m.Grant], steps: int) -> float:
    """Keep both channels waiting, end what is oldest, and return the part of the blocks that "a" held over time."""
    held = {"a": 0, "b": 0}
    for _ in range(steps):
        for name in held:
            rig.announce(name, *([5] * (20 - rig.machine.backlog.waiting[name])))
        running += rig.grants
        rig.grants = []
        rig.wait(10)
        for name in held:
            held[name] += rig.worker("w").ledger.held_by(name)
        rig.finish(running.popleft())
    return held["a"] / sum(held.values())


def test_new_weights_show_in_what_is_held() -> None:
    rig = Rig({"a": Share(1.0), "b": Share(1.0)})
    rig.open("w", shape(CAPACITY))
    running: deque[m.Grant] = deque()
    held_parts(rig, running, 300)  # until the first ones, of one channel alone, have ended
    assert held_parts(rig, running, 300) == pytest.approx(0.5, abs=0.02)
    reconfigure(rig, {"a": Share(4.0), "b": Share(1.0)})
    held_parts(rig, running, 300)
    assert held_parts(rig, running, 300) == pytest.approx(0.8, abs=0.02)
    reconfigure(rig, {"a": Share(1.0), "b": Share(9.0)})
    held_parts(rig, running, 300)
    assert held_parts(rig, running, 300) == pytest.approx(0.1, abs=0.02)


def test_what_is_held_above_a_lowered_ceiling_goes_by_completions() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *[10] * 12)
    first = list(rig.grants)
    assert len(first) == 6
    reconfigure(rig, {"a": Share(ceiling_share=0.5), "b": Share()})
    rig.announce("b", *[10] * 6)
    for done, grant in enumerate(first, 1):
        rig.grants = []
        rig.wait(10)
        rig.finish(grant)
        assert done > 3 or [new.channel for new in rig.grants] == ["b"]
        assert done < 3 or rig.worker("w").ledger.held_by("a") <= 30
    assert not any(isinstance(effect, m.Recall) for effect in rig.effects)


def test_a_raised_ceiling_is_used_at_once() -> None:
    rig = Rig({"a": Share(ceiling_share=0.5)})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *[10] * 12)
    assert len(rig.grants) == 3
    reconfigure(rig, {"a": Share()})
    assert len(rig.grants) == 6


def test_a_new_tier_goes_first_from_then_on() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.announce("a", *[10] * 6)
    rig.announce("b", *[10] * 6)
    reconfigure(rig, {"a": Share(tier=1), "b": Share()})
    rig.open("w", shape(CAPACITY))
    assert [grant.channel for grant in rig.grants] == ["b"] * 6


def test_a_new_guarantee_is_fenced_off_and_a_dropped_one_is_lent() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("b", *[15] * 8)
    reconfigure(rig, {"a": Share(guaranteed_share=0.5), "b": Share()})
    rig.announce("a", 30)
    running, rig.grants = deque(rig.grants), []
    for _ in range(2):
        rig.wait(10)
        rig.finish(running.popleft())
    assert [grant.channel for grant in rig.grants] == ["a"]
    (people,) = rig.grants
    reconfigure(rig, {"a": Share(), "b": Share()})
    rig.finish(people)
    assert [grant.channel for grant in rig.grants] == ["a", "b", "b"]


def test_a_removed_channel_goes_on_with_an_ordinary_share() -> None:
    rig = Rig({"a": Share(1.0, 0.5, 0.5, 3), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *[10] * 12)
    assert len(rig.grants) == 3
    reconfigure(rig, {"b": Share()})
    assert rig.machine.channel("a").share == Share()
    assert len(rig.grants) == 6
    assert "a" not in rig.machine.shares


def test_a_head_that_saves_has_its_payment_back_and_begins_all_the_same() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *[10] * 6)
    rig.announce("b", 50)
    worker = rig.worker("w")
    assert rig.machine._arbiter._savings.on(worker) is not None
    assert rig.machine.step(m.Reconfigure({"a": Share(), "b": Share(2.0)}), rig.now_ns) == []
    assert rig.machine._arbiter._savings.on(worker) is None
    assert rig.machine.channel("b").account(worker.group.pool).deficit_block_ns >= 0
    running, rig.grants = deque(rig.grants), []
    for _ in range(5):
        rig.wait(10)
        rig.finish(running.popleft())
    assert [grant.channel for grant in rig.grants] == ["b"]


def test_the_same_shares_again_change_nothing() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *[10] * 6)
    rig.announce("b", 50)
    saving = rig.machine._arbiter._savings.on(rig.worker("w"))
    reconfigure(rig, {"a": Share(), "b": Share()})
    assert rig.machine._arbiter._savings.on(rig.worker("w")) is saving


def windows(rig: Rig, *messages: m.Input) -> set[str]:
    """Feed messages and return the channels whose window was told."""
    return {effect.channel for effect in rig.tell(*messages) if isinstance(effect, m.SetWindow)}


def test_channels_that_the_queue_adds_get_a_window() -> None:
    rig = Rig({"a": Share()})
    assert windows(rig, m.QueueChannels(("a", "b"))) == {"b"}
    assert windows(rig, m.Tick()) == set()
    assert windows(rig, m.QueueChannels(("a",))) == set()
    assert windows(rig, m.QueueChannels(("a", "b"))) == {"b"}
    rig.tell(m.QueueClosed())
    assert windows(rig, m.QueueChannels(("a", "c"))) == set()
    assert rig.now_ns > SECOND_NS
