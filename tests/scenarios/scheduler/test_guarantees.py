"""What guarantees are worth beside everything else: growth, sequences, ceilings, tiers, large requests, time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.admission.isolation import BATCH, INTERACTIVE, LOADS, Run
from benchmarks.admission.stage import Stage
from services.scheduler.core import messages as m
from services.scheduler.core.sharing.share import Share
from tests.support.effort import long
from tests.support.scheduling import Rig, announced, shape
from tests.support.timeline import Call, Timeline

POLICIES = ("virtual-channels", "predictive")
STEP_MS = 20.0
"""Of the simulated engine while its cache is full: the time between two of its steps is less."""


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_that_grow_cost_a_guaranteed_channel_a_step_at_most(policy: str) -> None:
    load = LOADS["flood"]
    alone = Run(policy, load, 40, 0, (INTERACTIVE,)).waits().waits_ms
    beside = Run(policy, load, 100, 0, (INTERACTIVE, BATCH)).waits()
    assert beside.waits_ms["grant p99"] <= 1.2 * alone["grant p99"] + STEP_MS
    assert beside.waits_ms["ttft p99"] <= 1.2 * alone["ttft p99"] + 20 * STEP_MS
    assert policy == "virtual-channels" or beside.usage > 0.85


@pytest.mark.long
@pytest.mark.parametrize(("per_second", "since"), [(40.0, ("cold ", "")), (80.0, ("",))])
def test_a_channel_that_books_most_of_its_guarantee_still_has_its_grants_at_once(
    per_second: float, since: tuple[str, ...]
) -> None:
    load = LOADS["flood"]
    alone = Run("predictive", load, 40, 0, (INTERACTIVE,), per_second=per_second).waits().waits_ms
    beside = Run("predictive", load, 100, 0, (INTERACTIVE, BATCH), per_second=per_second).waits()
    for when in since:
        assert beside.waits_ms[f"{when}grant p99"] <= 1.2 * alone["grant p99"] + STEP_MS
    assert beside.booked[0] > per_second / 200
    assert beside.ratio > 99


def test_a_large_guarantee_that_is_hardly_used_is_lent() -> None:
    beside = Run("predictive", LOADS["flood"]._replace(blocks=3_000), 80, 0, (INTERACTIVE, BATCH), share=0.5).waits()
    assert beside.usage > 0.8
    assert beside.waits_ms["grant p99"] < STEP_MS


def recovering(shares: dict[str, Share], blocks: int) -> Rig:
    """Return a scheduler whose one engine has preempted: only what is within a guarantee is let in."""
    rig = Rig(shares, "predictive")
    epoch = rig.open("w", shape(blocks))
    rig.announce("batch", 1)
    for preemptions in (0, 1):
        rig.tell(m.EngineReport(epoch, epoch, None, 1, 1, preemptions, 10_000_000, 0.5))
    (outlook,) = [rig.machine.policy.outlook(worker) for worker in rig.machine.fleet]
    assert outlook is not None
    assert outlook.recovering
    return rig


def test_a_guarantee_counts_what_its_requests_are_expected_to_grow_to() -> None:
    rig = recovering({"safe": Share(1.0, 0.5), "batch": Share()}, 100)
    rig.announce("safe", *([1] * 60), max_tokens=40)
    worker = rig.worker("w")
    assert 0 < worker.ledger.held_by("safe") < 50, "they book little"
    assert 30 < rig.machine.policy.expected_of(worker, "safe") <= 50


def test_guarantees_bend_to_what_a_saving_head_is_expected_to_grow_to() -> None:
    rig = recovering({"safe": Share(1.0, 0.5), "batch": Share()}, 100)
    rig.announce("batch", 40, max_tokens=40)
    arbiter, worker = rig.machine._arbiter, rig.worker("w")
    saving = arbiter._savings.on(worker)
    assert saving is not None
    assert saving.peak_blocks > 50 > saving.blocks
    assert arbiter._guarantees.blocks(worker, rig.machine.channel("safe")) == 100 - saving.peak_blocks


@pytest.mark.parametrize(
    ("guarantee", "prompt_blocks"),
    [(0.3, 750), long(0.5, 493), long(0.5, 800)],
)
def test_a_large_request_beside_a_busy_guarantee_starts_when_what_ran_has_ended(
    guarantee: float, prompt_blocks: int
) -> None:
    """People's requests are let in for their prompts, and grow to ten times as much."""
    stage = Stage("predictive", {INTERACTIVE: Share(4.0, guarantee), BATCH: Share()}, 1_000)
    draw = random.Random(1)
    large = None
    for second in range(1, 50):
        if second == 25:
            large = stage.ask(BATCH, prompt_blocks * 16, 50, 100)
        for _ in range(60 - stage.penstock.waiting(INTERACTIVE)):
            stage.ask(INTERACTIVE, draw.randint(30, 60), draw.randint(400, 800), 900)
        stage.run_until(second)
    lives = stage.meter.lives
    longest_ns = max(
        life.done_ns - stage.penstock.granted_ns[number]
        for number, life in enumerate(lives)
        if stage.items[number].channel == INTERACTIVE and life.done_ns > 0
    )
    assert large is not None
    assert stage.grant_wait_ns(large) <= 2 * longest_ns


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_guarantee_holds_for_sequences_as_well(policy: str, tier: int) -> None:
    """Short requests on a large cache: an engine runs out of sequences long before blocks."""
    rig = Rig({"safe": Share(1.0, 0.25), "batch": Share(1.0, tier=tier)}, policy=policy)
    rig.open("w", shape(10_000, max_num_seqs=16))
    rig.announce("safe", *([1] * 4))
    running = rig.grants[:]
    rig.announce("batch", *([1] * 50))
    assert rig.worker("w").ledger.sequences_of("batch") == 12
    rig.wait(10)
    for grant in running:
        rig.finish(grant)  # used lately, and kept
    assert rig.worker("w").ledger.sequences_of("batch") == 12
    safe = rig.announce("safe", *([1] * 4))
    assert set(safe) <= set(rig.granted)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_guarantee_is_a_sequence_at_least(policy: str) -> None:
    rig = Rig({"batch": Share(), "chat": Share(1, 0.05)}, policy)
    rig.open("w", shape(1_000, max_num_seqs=10))
    rig.announce("chat", 10)
    rig.wait(100)
    rig.finish(rig.grants[-1])
    rig.announce("batch", *[10] * 40)
    for _ in range(5):
        (name,) = rig.announce("chat", 10)
        assert rig.granted[-1] == name
        rig.wait(100)
        rig.finish(rig.grants[-1])
    rig.check()


@pytest.mark.grid
@pytest.mark.parametrize("policy", POLICIES)
def test_more_guarantees_than_sequences_leave_everybody_turns(policy: str) -> None:
    guaranteed = [f"chat-{number}" for number in range(15)]
    rig = Rig({"batch": Share(5), **{name: Share(1, 0.05) for name in guaranteed}}, policy)
    rig.open("w", shape(1_000, max_num_seqs=10))
    for name in ("batch", *guaranteed):
        rig.announce(name, *[10] * 60)
    for number in range(400):
        rig.wait(10)
        rig.finish(rig.grants[number])
        assert rig.worker("w").ledger.sequences >= 10
    granted = Counter(grant.channel for grant in rig.grants)
    assert min(granted[name] for name in guaranteed) >= 10
    assert granted["batch"] >= 40
    rig.check()


@pytest.mark.parametrize(("channels", "sequences", "n"), [(2, 16, 16), (4, 8, 6), (1, 2, 2)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_many_completions_starts_beside_busy_guarantees(
    policy: str, channels: int, sequences: int, n: int
) -> None:
    safe = {f"safe-{number}": Share(1.0, 0.1) for number in range(channels)}
    rig = Rig({**safe, "batch": Share()}, policy=policy)
    rig.open("w", shape(1_000, max_num_seqs=sequences))
    running: list[m.Grant] = []
    asked: list[str] = []
    for step in range(100):
        rig.wait(10)
        for name in safe:
            rig.announce(name, *([1] * (2 - rig.machine.backlog.waiting[name])))
        if step == 20:
            asked = rig.announce("batch", 1, n=n)
        running += rig.grants
        if any(grant.request_id in asked for grant in running):
            return
        rig.grants.clear()
        if running:
            rig.finish(running.pop(0))
    raise AssertionError("it never starts")


@pytest.mark.parametrize("policy", POLICIES)
def test_standing_grants_leave_a_guarantee_its_sequences(policy: str) -> None:
    """Requests that come one at a time, each of which meets a standing grant."""
    rig = Rig({"safe": Share(1.0, 0.5), "batch": Share()}, policy, standing_ns=3_000_000_000)
    rig.open("w", shape(10_000, max_num_seqs=64), takes_standing=True)
    rig.announce("safe", *([1] * 32))
    running = [grant for grant in rig.grants if grant.standing is None]
    rig.wait(2_000)
    for grant in running[1:]:
        rig.finish(grant)
    rig.announce("batch", 1)
    ledger = rig.worker("w").ledger
    for number in range(100):
        rig.wait(20)
        rig.tell(m.Tick())
        stands = [g for g in rig.grants if g.standing is not None and g.channel == "batch" and g.request_id in ledger]
        if stands:
            met = announced(f"met-{number}", "batch", 1)
            rig.tell(m.GrantUsed(stands[0].epoch, stands[0].epoch, stands[0].request_id, met))
    assert 16 <= ledger.sequences_of("batch") <= 32


@pytest.mark.parametrize("policy", POLICIES)
def test_a_channel_at_its_ceiling_does_not_pass_its_own_older_request(policy: str) -> None:
    """It has two lines, for two names of one model."""
    rig = Rig({"capped": Share(1.0, 0.0, 0.5)}, policy=policy)
    rig.open("w", shape(100), model="base", aliases=("alias",))
    rig.announce("capped", *([10] * 5), model="alias")
    (large,) = rig.announce("capped", 20, model="base")
    rig.announce("capped", *([10] * 20), model="alias")
    for grant in rig.grants[:2]:
        rig.finish(grant)
    assert rig.granted[-1] == large


def test_a_request_beyond_its_channels_guarantee_keeps_no_blocks_idle() -> None:
    """In a higher tier it waits for what the lower leave, as one without a guarantee does."""
    draw = random.Random(1)
    timeline = Timeline({"first": Share(), "kept": Share(1.0, 0.25, tier=1)}, [100])
    held = []
    for step in range(400):
        calls = [Call(step, "first", draw.randint(1, 5), draw.randint(5, 20)) for _ in range(50)]
        timeline.advance([*calls, Call(step, "kept", 30, 20)] if step == 100 else calls)
        held.append(timeline.workers[0].ledger.held_blocks)
    assert min(held[10:]) >= 95


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_guarantee_used_lately_is_lent_when_that_is_long_ago(policy: str) -> None:
    rig = Rig({"safe": Share(1.0, 0.5), "batch": Share()}, policy=policy)
    rig.open("w", shape(100))
    rig.announce("safe", 50)
    rig.wait(100)
    rig.finish(rig.grants[-1])
    first, second = rig.announce("batch", 30, 30)
    assert rig.granted[1:] == [first]
    for _ in range(50):
        rig.wait(100)
        rig.tell(m.Tick())
    assert rig.granted[1:] == [first, second], "32 hold times later, though nothing has ended"


@pytest.mark.parametrize("runs", ["before", "meanwhile"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_guarantee_used_lately_is_kept_when_a_stream_breaks(policy: str, runs: str) -> None:
    """It ended before the stream broke, or is known to a scheduler only by what the worker has brought along."""
    rig = Rig({"safe": Share(1.0, 0.5), "batch": Share()}, policy=policy)
    if runs == "before":
        epoch = rig.open("w", shape(100))
        rig.announce("safe", 50)
        rig.wait(1_000)
        rig.finish(rig.grants[-1])
        rig.tell(m.WorkerClosed(epoch))
        rig.open("w", shape(100))
    else:
        epoch = rig.open("w", shape(100), [m.Holding("old", "safe", 50, 1)])
        rig.wait(1_000)
        rig.tell(m.CompletionAck(epoch, epoch, "old", 2, m.ReleaseCause.COMPLETED))
    first, second = rig.announce("batch", 30, 30)
    assert first in rig.granted
    assert second not in rig.granted
    rig.announce("safe", *[10] * 5)
    assert rig.granted[-5:] == [f"safe-{number}" for number in range(rig.position - 4, rig.position + 1)]
