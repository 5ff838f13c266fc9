"""What the arbiter promises: weights, guarantees, ceilings, no starvation, no idle blocks."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import SECOND_NS, Rig, shape

CAPACITY = 60
relaxed = settings(max_examples=examples(40), deadline=None)


def keep_waiting(rig: Rig, channel: str, least: int, draw: random.Random, largest: int = 10) -> None:
    """Announce until at least `least` requests of the channel wait."""
    missing = least - rig.machine.backlog.waiting[channel]
    if missing > 0:
        rig.announce(channel, *(draw.randint(1, largest) for _ in range(missing)))


class Meter:
    """Blocks held by each channel, summed over time: what shares are about."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.block_ms: Counter[str] = Counter()

    def wait(self, milliseconds: int) -> None:
        """Let time pass and count what is held meanwhile."""
        for worker in self.rig.machine.fleet:
            for channel, blocks in worker.ledger.held_by_channel().items():
                self.block_ms[channel] += blocks * milliseconds
        self.rig.wait(milliseconds)

    def part(self, channel: str) -> float:
        """Return the channel's part of all that was held."""
        return self.block_ms[channel] / sum(self.block_ms.values())


@settings(max_examples=examples(4), deadline=None)
@given(weights=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8)), seed=st.integers(0, 2**32))
def test_channels_with_work_occupy_blocks_by_weight(weights: tuple[int, int, int], seed: int) -> None:
    """Also if one channel's requests run three times as long as another's, and one's are larger."""
    draw = random.Random(seed)
    rig = Rig({f"c{number}": Share(float(weight)) for number, weight in enumerate(weights)})
    meter = Meter(rig)
    rig.open("w", shape(2 * CAPACITY))
    ends: list[tuple[int, int, str, m.Grant]] = []
    while rig.now_ns < 50 * SECOND_NS:
        for number, name in enumerate(rig.machine.shares):
            keep_waiting(rig, name, 60, draw, largest=20 if number else 5)
        for grant in rig.grants:
            long = 3 if grant.channel == "c1" else 1
            heapq.heappush(
                ends, (rig.now_ns + long * draw.randint(1, 500) * 1_000_000, len(rig.effects), grant.request_id, grant)
            )
        rig.grants = []
        end_ns, _, _, grant = heapq.heappop(ends)
        meter.wait((end_ns - rig.now_ns) // 1_000_000)
        rig.finish(grant)
    rig.check()
    for number, weight in enumerate(weights):
        assert meter.part(f"c{number}") == pytest.approx(weight / sum(weights), rel=0.1, abs=0.03)


@settings(max_examples=examples(4), deadline=None)
@given(
    weights=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    largest=st.integers(1, 100),
    completions=st.integers(1, 5),
    seed=st.integers(),
)
@example(weights=(1, 1), largest=100, completions=1, seed=0).via("one had a place for every fifty of the other")
@example(weights=(1, 3), largest=1, completions=5, seed=0).via("who waits for places gains by what others have of them")
def test_where_sequences_are_scarce_channels_occupy_those_by_weight(
    weights: tuple[int, int], largest: int, completions: int, seed: int
) -> None:
    """However many blocks their requests hold: there is room for a hundred in each place. Those of one may ask for
    several completions, no more than are left beside its part.
    """
    draw, occupied, order = random.Random(seed), Counter[str](), count()
    rig = Rig({f"c{number}": Share(float(weight)) for number, weight in enumerate(weights)})
    rig.open("w", shape(20 * 100, max_num_seqs=20))
    ends: list[tuple[int, int, m.Grant]] = []
    for step in range(2_000):
        for number, name in enumerate(rig.machine.shares):
            for _ in range(30 - rig.machine.backlog.waiting[name]):
                blocks, most = (draw.randint(1, largest), completions) if number else (1, 1)
                rig.announce(name, blocks, n=draw.randint(1, most))
        for grant in rig.grants:
            heapq.heappush(ends, (step + draw.randint(1, 20), next(order), grant))
        rig.grants = []
        for name in rig.machine.shares:
            occupied[name] += rig.worker("w").ledger.sequences_of(name)
        rig.wait(10)
        while ends and ends[0][0] <= step:
            rig.finish(heapq.heappop(ends)[2])
    for number, weight in enumerate(weights):
        part = occupied[f"c{number}"] / occupied.total()
        assert part == pytest.approx(weight / sum(weights), rel=0.1, abs=0.03)


def test_weights_count_what_is_held_after_the_settle_and_not_what_was_booked() -> None:
    rig = Rig({"loose": Share(), "tight": Share()})
    meter = Meter(rig)
    draw = random.Random(1)
    rig.open("w", shape(CAPACITY))
    running: deque[m.Grant] = deque()
    for _ in range(2_000):
        for channel in ("loose", "tight"):
            rig.announce(channel, *([20] * (40 - rig.machine.backlog.waiting[channel])))
        while rig.grants:
            grants, rig.grants = rig.grants, []
            for grant in grants:
                running.append(grant)
                rig.settle(grant, 2 if grant.channel == "loose" else 20)
        meter.wait(10)
        running.rotate(-draw.randrange(len(running)))
        rig.finish(running.popleft())
    assert meter.part("loose") == pytest.approx(0.5, abs=0.07)


@relaxed
@given(seed=st.integers(0, 2**32), guarantee=st.floats(0.05, 0.6), ceiling=st.floats(0.2, 1.0))
def test_guarantees_hold_and_ceilings_too(seed: int, guarantee: float, ceiling: float) -> None:
    draw = random.Random(seed)
    shares = {"safe": Share(1.0, guarantee), "capped": Share(4.0, 0.0, ceiling), "free": Share(2.0)}
    rig = Rig(shares)
    for worker_id in ("w1", "w2"):
        rig.open(worker_id, shape(CAPACITY))
    running: list[m.Grant] = []
    for _ in range(150):
        for name in shares:
            if draw.random() < 0.5:
                rig.announce(name, *(draw.randint(1, 25) for _ in range(draw.randint(0, 4))))
        running += rig.grants
        rig.grants = []
        if running and draw.random() < 0.8:
            rig.finish(running.pop(draw.randrange(len(running))))
            running += rig.grants
            rig.grants = []
        check_guarantee(rig, "safe")
        check_ceiling(rig, "capped")
        rig.check()


def check_guarantee(rig: Rig, name: str) -> None:
    """A head within its channel's guarantee waits only while the blocks are lent out or bent away for a saving."""
    channel = rig.machine.channel(name)
    for worker in rig.machine.fleet:
        for _line, head in channel.heads():
            blocks = head.announced.prompt_tokens
            within = worker.ledger.held_by(name) + blocks <= channel.share.guaranteed_blocks(CAPACITY)
            if within and rig.machine._arbiter._savings.on(worker) is None:
                assert worker.usable_blocks < blocks


def check_ceiling(rig: Rig, name: str) -> None:
    channel = rig.machine.channel(name)
    for worker in rig.machine.fleet:
        alone = worker.ledger.reservations_by_channel()[name] <= 1
        assert alone or worker.ledger.held_by(name) <= channel.share.ceiling_blocks(CAPACITY)


@given(lent=st.integers(1, CAPACITY))
def test_an_idle_guarantee_is_lent_and_comes_back_first(lent: int) -> None:
    rig = Rig({"safe": Share(1.0, 0.5), "other": Share(100.0)})
    rig.open("w", shape(CAPACITY))
    rig.announce("other", *([1] * 500))
    assert rig.worker("w").ledger.held_by("other") == CAPACITY  # nobody of `safe` waits: all is lent
    safe = rig.announce("safe", *([1] * 30))
    for grant in rig.grants[:lent]:
        rig.finish(grant)
    assert rig.worker("w").ledger.held_by("safe") == min(lent, 30)
    assert set(rig.granted) >= set(safe[: min(lent, 30)])


@relaxed
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, CAPACITY),
    small_weight=st.integers(1, 50),
    guarantee=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
)
def test_a_large_head_is_not_starved_by_small_ones(seed: int, size: int, small_weight: int, guarantee: float) -> None:
    draw = random.Random(seed)
    rig = Rig({"small": Share(float(small_weight), guarantee), "large": Share(1.0)})
    rig.open("w", shape(CAPACITY))
    keep_waiting(rig, "small", 200, draw, largest=3)
    (large,) = rig.announce("large", size)
    # Until it may save, the others use up one round; then what ran when it began to save has to end.
    bound = 2 * CAPACITY + (small_weight + 1) * max(8, size)
    running: list[m.Grant] = []
    completions = 0
    while large not in rig.granted:
        running += rig.grants
        rig.grants = []
        rig.wait(10)
        rig.finish(running.pop(draw.randrange(len(running))))
        keep_waiting(rig, "small", 200, draw, largest=3)
        completions += 1
        assert completions <= bound
    rig.check()


@relaxed
@given(hold_ms=st.integers(0, 60_000), ended=st.integers(0, 4 * CAPACITY), size=st.integers(1, 10))
@example(hold_ms=100, ended=CAPACITY, size=1).via("the first that ended took a tenth of a second")
def test_the_first_to_come_does_not_hold_up_the_second(hold_ms: int, ended: int, size: int) -> None:
    """Before the first request has ended nobody knows how long they hold blocks; no turn may come of guessing that.

    Of the flood only the head that has paid and saves goes first, and one whose turn is as near.
    """
    rig = Rig({"flood": Share(), "quick": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("flood", *([size] * (6 * CAPACITY)))
    done = 0
    while done < ended:
        running = rig.grants[done:ended]
        rig.wait(hold_ms)
        for grant in running:
            rig.finish(grant)
        done += len(running)
    (quick,) = rig.announce("quick", 1)
    rig.wait(hold_ms)
    for grant in rig.grants[done : done + 3]:
        rig.finish(grant)
    assert quick in rig.granted


@relaxed
@given(seed=st.integers(0, 2**32), size=st.integers(2, CAPACITY))
def test_a_channel_that_keeps_returning_does_not_starve_a_large_head(seed: int, size: int) -> None:
    draw = random.Random(seed)
    rig = Rig({"small": Share(), "large": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("small", *([1] * CAPACITY))
    (large,) = rig.announce("large", size)
    running: list[m.Grant] = []
    completions = 0
    while large not in rig.granted:
        running += rig.grants
        rig.grants = []
        rig.wait(draw.randint(1, 20))
        rig.finish(running.pop(draw.randrange(len(running))))
        if not rig.machine.backlog.waiting["small"]:
            rig.announce("small", 1)
        completions += 1
        assert completions <= 2 * CAPACITY + 2 * size
    rig.check()


@relaxed
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["worst-case", "tokenizer-ack", "virtual-channels"]))
def test_nothing_that_fits_is_left_waiting_and_everything_ends(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    rig = Rig({"a": Share(3.0), "b": Share(1.0)}, policy)
    for number in range(3):
        # A window is larger than any pool here, so `worst-case` would use only the largest of unequal workers.
        rig.open(f"w{number}", shape(CAPACITY if policy == "worst-case" else draw.randint(20, CAPACITY)))
    for _ in range(10):
        rig.announce(draw.choice("ab"), *(draw.randint(1, 20) for _ in range(10)))
    running: list[m.Grant] = []
    while len(rig.granted) or running:
        running += rig.grants
        rig.grants = []
        check_nothing_idle(rig)
        rig.finish(running.pop(draw.randrange(len(running))))
    assert sum(rig.machine.backlog.waiting.values()) == 0
    assert all(worker.ledger.free_blocks == worker.ledger.capacity_blocks for worker in rig.machine.fleet)


def check_nothing_idle(rig: Rig) -> None:
    """A head waits only where it does not fit or where another one saves."""
    for name in ("a", "b"):
        for line, head in rig.machine.channel(name).heads():
            for worker in rig.machine.fleet:
                saving = rig.machine._arbiter._savings.on(worker)
                if saving is None or saving.line is line:
                    blocks = rig.machine.policy.booking_blocks(head.announced, worker.shape)
                    assert min(blocks, worker.shape.capacity_blocks) > worker.usable_blocks


@relaxed
@given(seed=st.integers(0, 2**32))
def test_within_a_channel_requests_leave_in_order(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig({"a": Share(), "b": Share(2.0)})
    rig.open("w", shape(CAPACITY))
    order: dict[str, tuple[int, int]] = {}
    for _ in range(30):
        priority = draw.randint(-2, 2)
        (name,) = rig.announce("a", CAPACITY, priority=priority)
        order[name] = (priority, rig.position)
    first = rig.granted[0]
    while len(rig.granted) < 30:
        rig.finish(rig.grants[-1])
    rest = [name for name in rig.granted if name != first]
    assert rest == sorted(rest, key=lambda name: order[name])


def test_a_model_nobody_serves_holds_up_nobody() -> None:
    rig = Rig({"a": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *([1] * 50), model="unknown")
    served = rig.announce("a", 5, 5, model="m")
    assert rig.granted == served
    assert not list(rig.machine.channel("a").heads_for(rig.worker("w").models))


@pytest.mark.parametrize("waiting", [100, 20_000])
def test_a_pass_looks_at_heads_and_not_at_everything_that_waits(waiting: int) -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(CAPACITY))
    rig.announce("a", *([7] * waiting))
    rig.announce("b", *([7] * waiting))
    looked_at = 0
    policy = rig.machine.policy
    booking_blocks = policy.booking_blocks

    def counting(request: m.Announced, engine: m.EngineShape) -> int:
        nonlocal looked_at
        looked_at += 1
        return booking_blocks(request, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy), "booking_blocks", staticmethod(counting))
        for grant in list(rig.grants):
            rig.finish(grant)
    assert looked_at <= 3 * 8  # at most the head granted and the next one of each channel, per grant
