"""The same requests through a block-exact engine: pushed all at once, by `virtual-channels`, and by `predictive`."""

from __future__ import annotations

import math
import random

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.admission.lengths import Kind, bin_of, prompt_class
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.admission.predictive import Predictive
from services.worker.core.sizing import Sizes
from tests.support.scheduling import announced
from tests.support.stepping import Granted, Lengths, Outcome, pushed

SIZES = Sizes(capacity_blocks=256, blocks_total=256, block_size=32, max_model_len=2048)
MAX_TOKENS = 512
REQUESTS = 600
MOST_PREEMPTED = 0.03
"""Two dozen requests share this pool: those that run together surprise more than in a large one."""

KIND = Kind("m", "batch", prompt_class(50))


def drawn(seed: int, mean_prompt: int = 127, mean_output: int = 128, spread: float = 0.8) -> list[Lengths]:
    """Return log-normal lengths; outputs are about a quarter of MAX_TOKENS."""
    rng = random.Random(seed)

    def draw(mean: int, least: int, most: int) -> int:
        return max(least, min(most, round(rng.lognormvariate(math.log(mean) - spread * spread / 2, spread))))

    return [Lengths(draw(mean_prompt, 16, 768), draw(mean_output, 1, MAX_TOKENS)) for _ in range(REQUESTS)]


def run(policy: Policy, lengths: list[Lengths], lag_steps: int = 1, max_tokens: int = MAX_TOKENS) -> Outcome:
    return Granted(policy, lengths, SIZES, max_tokens, lag_steps).run()


def test_it_takes_little_more_steps_than_pushing_and_hardly_preempts() -> None:
    lengths = drawn(1)
    push, channels, predictive = (
        pushed(lengths, SIZES),
        run(POLICIES["virtual-channels"], lengths),
        run(Predictive(), lengths),
    )
    assert push.preemptions > REQUESTS / 4, "the workload is too light to show anything"
    assert predictive.preemptions <= MOST_PREEMPTED * REQUESTS
    assert predictive.steps < 1.2 * push.steps < 0.6 * channels.steps
    assert predictive.usage > 0.8
    assert channels.usage < 0.4


def test_it_goes_on_learning_when_outputs_become_longer() -> None:
    """Outputs ten times as long cannot be foreseen: some of those running at the change are preempted."""
    lengths = [*drawn(2, mean_output=30)[: REQUESTS // 2], *drawn(3, mean_output=300)[: REQUESTS // 2]]
    outcome = run(Predictive(), lengths)
    assert outcome.preemptions <= 0.1 * REQUESTS
    assert outcome.steps < 1.4 * pushed(lengths, SIZES).steps


def test_outputs_that_all_reach_their_limit_are_expected_to() -> None:
    lengths = [Lengths(prompt, 64) for prompt, _ in drawn(4)[:200]]
    assert run(Predictive(), lengths, max_tokens=64).preemptions <= MOST_PREEMPTED * len(lengths)


def test_an_output_that_its_limit_cut_is_not_taken_for_an_end() -> None:
    policy_and_engine = Granted(Predictive(), [Lengths(50, 64)] * 60, SIZES, 64, 1)
    policy_and_engine.run()
    policy = policy_and_engine.machine.policy
    assert isinstance(policy, Predictive)
    assert policy._lengths.curve(Kind("m", "batch", prompt_class(50))).staying(0, 79) > 0.8


def test_outputs_that_are_all_cut_from_some_time_on_are_expected_to_be() -> None:
    """Early ends alone were learned from; of what comes then none ends by itself."""
    lengths = [Lengths(50, 20)] * 100 + [Lengths(50, 256)] * 300
    granted = Granted(Predictive(), lengths, SIZES, 256, 1)
    granted.run()
    policy = granted.machine.policy
    assert isinstance(policy, Predictive)
    assert policy._lengths.curve(KIND).staying(0, 100) > 0.6


def test_what_ran_on_a_lost_worker_is_not_taken_to_run_on() -> None:
    """Lengths learned afterwards say what they would have said without it."""

    def chance(lost: int) -> float:
        machine = Granted(Predictive(), [], SIZES, 64, 1).machine
        policy = machine.policy
        assert isinstance(policy, Predictive)
        shape = m.EngineShape(256, 32, 2048, 256)
        worker = machine.fleet.open(m.WorkerOpened(99, "lost", "i", ("m",), shape))
        policy.opened(worker)
        for number in range(lost):
            request = announced(f"lost-{number}", "batch", 50, number, max_tokens=64)
            policy.booked(worker, request, 2, None)
            policy.settled(worker, m.TokenizerAck(99, 99, request.request_id, 1, 3, 50, 0, 64), 0)
        policy.ended(worker)
        for tokens in [20] * 5:
            policy._lengths.reached(KIND, 0, bin_of(tokens))
            policy._lengths.ended(KIND, tokens)
        return policy._lengths.curve(KIND).reaching(30)

    assert chance(lost=50) == pytest.approx(chance(lost=0), abs=0.2)


def test_a_higher_target_fills_the_cache_higher() -> None:
    lengths = drawn(5)
    careful, daring = run(Predictive(0.0), lengths), run(Predictive(1000.0), lengths)
    assert careful.usage < daring.usage
    assert careful.preemptions < daring.preemptions


@pytest.mark.parametrize("lag_steps", [0, 5])
def test_grants_that_take_long_cost_usage_and_not_preemptions(lag_steps: int) -> None:
    outcome = run(Predictive(), drawn(6), lag_steps)
    assert outcome.preemptions <= MOST_PREEMPTED * REQUESTS
    assert outcome.usage > 0.75


@pytest.mark.parametrize(("away_ms", "roomier"), [(1, False), (400, True)])
def test_room_is_looked_for_where_a_grant_gets_there(away_ms: int, roomier: bool) -> None:
    """Outputs of 20 tokens: those that run now have ended when a grant arrives that takes fifty steps of 8 ms."""
    machine = Granted(Predictive(), [], SIZES, 64, 1).machine
    policy = machine.policy
    assert isinstance(policy, Predictive)
    worker = machine.fleet.open(m.WorkerOpened(99, "w", "i", ("m",), m.EngineShape(256, 32, 2048, 256)))
    policy.opened(worker)
    for _ in range(100):
        policy._lengths.reached(KIND, 0, bin_of(20))
        policy._lengths.ended(KIND, 20)
    for number in range(90):
        request = announced(f"r-{number}", "batch", 50, number, max_tokens=64)
        worker.ledger.book(request.request_id, "batch", 2, 1)
        policy.booked(worker, request, 2, 1_000_000)
    new = announced("new", "batch", 50, 100, max_tokens=64)
    before = policy.room_blocks(new, worker, 2)
    ack = m.TokenizerAck(99, 99, "r-0", 1, 2, 50, 0, 64)
    policy.settled(worker, ack, (1 + away_ms) * 1_000_000)
    policy.reported(worker, m.EngineReport(99, 99, step_ns=8_000_000))
    assert (policy.room_blocks(new, worker, 2) > before + 10) is roomier
