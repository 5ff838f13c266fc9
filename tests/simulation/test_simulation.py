"""The production cores under one seeded scheduler of events and faults: fixed seeds, and what they can find."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.coverage import Cells, missing
from tests.simulation.plan import Plan
from tests.simulation.planted import PLANTS, plant
from tests.simulation.run import Simulation
from tests.simulation.shrink import failure_of, shrink

SEEDS = range(120)
FOUND_BY = {"skipped-refund": 1, "stale-completion": 4, "ack-before-sync": 0}
"""The first seed, from 0 on, that finds each planted bug."""

DIGEST = """
import hashlib, logging
from tests.simulation.plan import Plan
from tests.simulation.run import Simulation
logging.disable(logging.CRITICAL)
for seed in (3, 11):
    simulation = Simulation(Plan.draw(seed), verbose=True)
    simulation.run()
    print(hashlib.sha256("\\n".join(simulation.world.log).encode()).hexdigest(), len(simulation.world.log) > 100)
"""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # the committer logs each failure of the store, and there are many
    yield
    logging.disable(logging.NOTSET)


def test_nothing_is_lost_and_nothing_done_twice_whatever_fails() -> None:
    cells: Cells = Counter()
    for seed in SEEDS:
        cells.update(Simulation(Plan.draw(seed)).run().cells)
    assert not missing(cells, every_cell=False), "a fault never happened: the test proves less than it says"


def test_a_seed_is_a_whole_run_in_any_process() -> None:
    command = [sys.executable, "-c", DIGEST]
    digests = {
        subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": hash_seed}).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests.pop().count("True") == 2


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    plan = Plan.draw(FOUND_BY[name])
    assert failure_of(plan) is None
    with plant(name):
        assert failure_of(plan) is not None
    assert failure_of(plan) is None, "the bug stayed"


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    plan = Plan.draw(FOUND_BY["ack-before-sync"])
    with plant("ack-before-sync"):
        failure = failure_of(plan)
        assert failure is not None
        smallest, last = shrink(plan, failure)
        assert failure_of(smallest) == last
    assert not smallest.faults, "it needs no fault"
    assert len(smallest.requests) == 1
    assert smallest.options == plan.options
