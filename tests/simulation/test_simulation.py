"""The production cores under one seeded scheduler of events and faults: fixed seeds, and what they can find."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.__main__ import main
from tests.simulation.coverage import Cells, missing
from tests.simulation.plan import Plan
from tests.simulation.planted import PLANTS, plant
from tests.simulation.run import Simulation
from tests.simulation.shrink import failure_of, shrink
from tests.support.modules import COMPILED

SEEDS = range(60)
FOUND_BY = {
    "skipped-refund": 1,
    "stale-completion": 37,
    "ack-before-sync": 0,
    "numbers-given-twice": 45,
    "answer-before-sync": 0,
    "built-of-doubt": 3,
    "told-in-doubt": 133,
    "looked-up-before-heal": 1602,
    "grant-beyond-free": 3,
    "last-in-first-out": 2,
    "last-attempts-share": 8,
    "still-standing": 9,
    "standing-for-ever": 0,
}
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


cannot_be_patched = pytest.mark.skipif(COMPILED, reason="a bug cannot be planted in a compiled class")


@cannot_be_patched
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    plan = Plan.draw(FOUND_BY[name])
    assert failure_of(plan) is None
    with plant(name):
        assert failure_of(plan) is not None
    assert failure_of(plan) is None, "the bug stayed"


@cannot_be_patched
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--seeds 0", "nothing would be played"),
        ("--seeds -5", "-5 is less than 0"),
        ("--fixed -3 --seeds 1", "-3 is less than 0"),
        ("--seeds 5 --faults 3", "they go with --seed"),
        ("--seed 17 --faults 99", "seed 17 has no fault 99"),
        ("--seed 17 --requests 999", "seed 17 has no request 999"),
        ("--seed 17 --seeds 3", "--seed replays one seed"),
        ("--seed 17 --faults x", "invalid numbers value: 'x'"),
        ("--jobs 0", "0 is less than 1"),
    ],
)
def test_options_that_would_show_nothing_are_refused(
    arguments: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.simulation", *arguments.split()])
    try:
        status: object = main()
    except SystemExit as error:
        status = error.code
    told = capsys.readouterr()
    assert (status, told.out) == (2, "")
    assert text in told.err


@cannot_be_patched
def test_a_search_that_finds_no_bug_says_nothing_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--first", "0", "--seeds", "1", "--jobs", "1", "--plant", "grant-beyond-free"]
    monkeypatch.setattr(sys, "argv", ["tests.simulation", *arguments])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "1 seeds found nothing",
        "the planted bug 'grant-beyond-free' was NOT found",
    ]
