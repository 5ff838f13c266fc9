"""The production cores under one seeded scheduler of events and faults."""

from __future__ import annotations

import pytest

from services.queue.core.book import Book
from services.queue.core.entry import Entry, LeaseRef
from services.scheduler.core.ledger import Change, Ledger, Verdict
from tests.simulation.run import Simulation
from tests.simulation.world import Options

FAULTS = (
    "queue crash", "queue crash before commit", "queue crash after commit", "scheduler crash", "worker crash",
    "Work stream broken", "Credits stream broken", "Backlog stream broken", "duplicate ACK", "engine failure",
    "partition", "stop CLIENT", "stop DEADLINE", "stop LEASE_LOST", "stale completion",
    "reservation grown", "preemption",
)  # fmt: skip

SEEDS = range(300)


def play(seed: int) -> dict[str, int]:
    """Play one seed and return what happened in it."""
    return Simulation(Options.draw(seed)).run()


def test_nothing_is_lost_and_nothing_done_twice_whatever_fails() -> None:
    happened: dict[str, int] = dict.fromkeys(FAULTS, 0)
    for seed in SEEDS:
        for kind, count in play(seed).items():
            happened[kind] = happened.get(kind, 0) + count
    assert not [kind for kind in FAULTS if not happened[kind]], (
        "a fault never happened: the test proves less than it says"
    )


def test_a_seed_is_a_whole_run() -> None:
    transcripts = []
    for _ in range(2):
        simulation = Simulation(Options.draw(11))
        simulation.run()
        transcripts.append(simulation.world.log)
    assert transcripts[0] == transcripts[1]
    assert transcripts[0]


def finds_it() -> bool:
    """Return whether some seed breaks a promise."""
    for seed in SEEDS:
        try:
            play(seed)
        except (AssertionError, RuntimeError, LookupError):
            return True
    return False


def test_it_finds_a_completion_accepted_under_a_stale_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def leased(self: Book, lease: LeaseRef) -> Entry | None:
        entry = self.find(lease.request_id)
        return entry if entry is not None and entry.seq in self.leases else None

    monkeypatch.setattr(Book, "leased", leased)
    assert finds_it()


def test_it_finds_a_credit_that_never_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Ledger.release

    def forgetful(self: Ledger, request_id: str, seq: int) -> Change:
        reservation = self.reservation(request_id)
        if reservation is not None and not reservation.settled:
            return Change(Verdict.DUPLICATE)
        return release(self, request_id, seq)

    monkeypatch.setattr(Ledger, "release", forgetful)
    assert finds_it()
