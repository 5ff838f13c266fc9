"""The ledger, case by case."""

from __future__ import annotations

import tracemalloc

import pytest

from services.scheduler.core import ledger as ledger_module
from services.scheduler.core.ledger import RELEASES_REMEMBERED, Change, Ledger, Verdict
from services.scheduler.core.messages import Holding


def booked(blocks: int = 60, capacity: int = 100) -> Ledger:
    ledger = Ledger(capacity)
    assert ledger.book("a", "batch", blocks)
    return ledger


def test_a_booking_moves_blocks_from_free_to_held() -> None:
    ledger = booked()
    assert (ledger.free_blocks, ledger.held_blocks, ledger.held_by("batch")) == (40, 60, 60)


@pytest.mark.parametrize(("name", "blocks"), [("b", 41), ("a", 1)])
def test_a_booking_without_room_or_of_a_known_name_changes_nothing(name: str, blocks: int) -> None:
    ledger = booked()
    assert not ledger.book(name, "batch", blocks)
    assert (ledger.free_blocks, len(ledger)) == (40, 1)


def test_a_booking_of_nothing_and_a_ledger_of_nothing_are_defects() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        booked().book("b", "batch", 0)
    with pytest.raises(ValueError, match="capacity_blocks"):
        Ledger(0)


def test_settle_refunds_the_difference() -> None:
    ledger = booked()
    assert ledger.settle("a", 1, 5) == Change(Verdict.APPLIED, 55)
    assert ledger.free_blocks == 95
    reservation = ledger.reservation("a")
    assert reservation is not None
    assert (reservation.booked_blocks, reservation.held_blocks, reservation.settled) == (60, 5, True)


def test_settle_may_grow_into_what_is_free_and_no_further() -> None:
    ledger = booked()
    assert ledger.settle("a", 1, 100) == Change(Verdict.APPLIED, -40)
    assert ledger.settle("a", 2, 101) == Change(Verdict.NO_ROOM)
    assert ledger.free_blocks == 0
    assert ledger.settle("a", 2, 10).verdict is Verdict.APPLIED  # the refused one used up no sequence number


def test_release_returns_what_is_held_and_not_what_was_booked() -> None:
    ledger = booked()
    ledger.settle("a", 1, 5)
    assert ledger.release("a", 2) == Change(Verdict.APPLIED, 5)
    assert ledger.free_blocks == 100


def test_a_second_release_is_late_and_an_unheard_of_one_is_unknown() -> None:
    ledger = booked()
    ledger.release("a", 1)
    assert ledger.release("a", 2).verdict is Verdict.LATE
    assert ledger.settle("a", 3, 1).verdict is Verdict.LATE
    assert ledger.release("b", 1).verdict is Verdict.UNKNOWN


def test_an_overtaken_settle_changes_nothing() -> None:
    ledger = booked()
    ledger.settle("a", 2, 5)
    assert ledger.settle("a", 1, 50).verdict is Verdict.DUPLICATE
    assert ledger.settle("a", 2, 50).verdict is Verdict.DUPLICATE
    assert ledger.held_blocks == 5


def test_an_inventory_beyond_the_capacity_is_paid_off_before_anything_is_booked() -> None:
    ledger = Ledger(10)
    ledger.adopt([Holding("a", "batch", 8, 3, 4), Holding("b", "interactive", 7, 4)])
    assert ledger.sequences == 5
    assert (ledger.free_blocks, ledger.overcommitted_blocks, ledger.held_blocks) == (0, 5, 15)
    assert ledger.audit() == []
    assert not ledger.book("c", "batch", 1)
    ledger.release("b", 5)
    assert (ledger.free_blocks, ledger.overcommitted_blocks) == (2, 0)
    assert ledger.release("a", 3).verdict is Verdict.DUPLICATE  # the inventory's sequence number has been used
    ledger.release("a", 6)
    assert ledger.free_blocks == 10


def test_blocks_are_booked_ahead_of_what_others_give_back() -> None:
    ledger = Ledger(100, ahead_blocks=5)
    assert ledger.bookable_blocks == 100
    assert not ledger.book("a", "batch", 101)
    assert ledger.book("a", "batch", 10)
    assert ledger.bookable_blocks == 95
    assert ledger.book("b", "batch", 91)
    assert (ledger.free_blocks, ledger.overcommitted_blocks, ledger.bookable_blocks) == (0, 1, 4)
    assert not ledger.book("c", "batch", 5)
    assert ledger.book("c", "interactive", 4)
    assert (ledger.overcommitted_blocks, ledger.bookable_blocks) == (5, 0)
    ledger.settle("b", 1, 93, may_overcommit=True)
    assert (ledger.overcommitted_blocks, ledger.bookable_blocks) == (7, 0)
    ledger.release("a", 2)
    assert (ledger.free_blocks, ledger.overcommitted_blocks, ledger.bookable_blocks) == (3, 0, 8)
    assert ledger.audit() == []


def test_what_its_engine_makes_room_for_is_booked_beyond_what_is_free() -> None:
    ledger = Ledger(10)
    assert ledger.book("a", "batch", 8)
    assert not ledger.book("b", "interactive", 5)
    assert ledger.book("b", "interactive", 5, may_overcommit=True)
    assert not ledger.book("b", "interactive", 1, may_overcommit=True), "it has a reservation"
    assert (ledger.free_blocks, ledger.overcommitted_blocks, ledger.bookable_blocks) == (0, 3, 0)
    ledger.release("a", 1)
    assert (ledger.free_blocks, ledger.overcommitted_blocks) == (5, 0)
    assert ledger.audit() == []


def test_less_than_nothing_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="ahead_blocks must not be negative, got -1"):
        Ledger(10, -1)


def test_shrinking_is_never_refused_while_overcommitted() -> None:
    ledger = Ledger(10)
    ledger.adopt([Holding("a", "batch", 15, 1)])
    assert ledger.settle("a", 2, 12) == Change(Verdict.APPLIED, 3)
    assert ledger.settle("a", 3, 13).verdict is Verdict.NO_ROOM
    assert ledger.overcommitted_blocks == 2


def test_drop_returns_everything_once() -> None:
    ledger = booked()
    ledger.book("b", "interactive", 10, sequences=3)
    assert ledger.drop() == {"a": 60, "b": 10}
    assert ledger.drop() == {}
    assert (ledger.free_blocks, ledger.sequences, ledger.held_by_channel()) == (100, 0, {})


@pytest.mark.parametrize("attribute", ["free_blocks", "overcommitted_blocks", "sequences"])
@pytest.mark.parametrize("by", [-1, 1])
def test_the_audit_sees_every_total_that_is_off(attribute: str, by: int) -> None:
    ledger = booked()
    setattr(ledger, attribute, getattr(ledger, attribute) + by)
    assert ledger.audit()


def test_the_audit_sees_a_channel_total_that_is_off() -> None:
    ledger = booked()
    ledger._held_by_channel["interactive"] = 1
    assert len(ledger.audit()) == 1


def test_what_is_remembered_of_releases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RELEASES_REMEMBERED", 2)
    ledger = Ledger(10)
    for seq, name in enumerate(("a", "b", "c"), 1):
        ledger.book(name, "batch", 1)
        ledger.release(name, seq)
    assert ledger.release("a", 9).verdict is Verdict.UNKNOWN
    assert ledger.release("b", 9).verdict is Verdict.LATE


def test_what_is_remembered_of_releases_is_little_for_each_of_many_workers() -> None:
    tracemalloc.start()
    ledger = Ledger(10)
    for seq in range(8 * RELEASES_REMEMBERED):
        name = f"{seq:036d}"
        ledger.book(name, "batch", 1)
        ledger.release(name, seq + 1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000
    assert ledger.release(f"{8 * RELEASES_REMEMBERED - 1:036d}", 9).verdict is Verdict.LATE
