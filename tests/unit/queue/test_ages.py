"""How old what is kept is, over lives whose clocks contradict each other."""

from __future__ import annotations

import pytest

from services.queue.core import records
from services.queue.core.ages import COUNTED_GAP_NS, MOST_GAPS, NO_GAPS, Ages, Gap
from services.queue.core.effects import Write
from services.queue.storage.lives import NOTE_NS, Lives
from services.queue.storage.store import StoreDamagedError
from tests.support.memory_store import MemoryStore

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
WEEK_NS = 7 * DAY_NS
NOW_NS = 10_000 * DAY_NS


def test_without_gaps_age_is_what_the_clock_says() -> None:
    assert NO_GAPS.ago(NOW_NS, WEEK_NS) == NOW_NS - WEEK_NS
    assert NO_GAPS.begun(NOW_NS - COUNTED_GAP_NS, NOW_NS) == NO_GAPS, "a restart takes its time"


def test_a_gap_is_not_counted() -> None:
    ages = NO_GAPS.begun(NOW_NS - 8 * DAY_NS, NOW_NS)
    assert ages.ago(NOW_NS, WEEK_NS) == NOW_NS - 15 * DAY_NS
    assert ages.ago(NOW_NS + DAY_NS, WEEK_NS) == NOW_NS - 14 * DAY_NS
    assert ages.ago(NOW_NS + WEEK_NS, WEEK_NS) == NOW_NS, "what was stored before is as old as this life"
    assert ages.ago(NOW_NS + 2 * WEEK_NS, WEEK_NS) == NOW_NS + WEEK_NS


def test_gaps_add_up() -> None:
    ages = NO_GAPS.begun(NOW_NS, NOW_NS + DAY_NS).begun(NOW_NS + 2 * DAY_NS, NOW_NS + 5 * DAY_NS)
    assert ages.ago(NOW_NS + 6 * DAY_NS, 3 * DAY_NS) == NOW_NS - DAY_NS
    assert ages.ago(NOW_NS + 6 * DAY_NS, DAY_NS // 2) == NOW_NS + 6 * DAY_NS - DAY_NS // 2


def test_a_clock_that_was_ahead_and_goes_back_leaves_nothing_that_has_not_been() -> None:
    ahead = NO_GAPS.begun(NOW_NS, NOW_NS + 8 * DAY_NS)
    right = ahead.begun(NOW_NS + 9 * DAY_NS, NOW_NS + HOUR_NS)
    assert right == Ages((Gap(NOW_NS, NOW_NS + HOUR_NS),))
    assert right.begun(NOW_NS + 2 * HOUR_NS, NOW_NS - HOUR_NS) == NO_GAPS
    assert right.begun(NOW_NS + 2 * HOUR_NS, NOW_NS) == NO_GAPS, "a gap of no length is none"


def test_of_many_gaps_the_oldest_become_one() -> None:
    ages = NO_GAPS
    for day in range(MOST_GAPS + 3):
        ages = ages.begun(NOW_NS + day * DAY_NS, NOW_NS + day * DAY_NS + HOUR_NS)
    assert len(ages.gaps) == MOST_GAPS
    assert ages.gaps[:2] == (
        Gap(NOW_NS, NOW_NS + 3 * DAY_NS + HOUR_NS),
        Gap(NOW_NS + 4 * DAY_NS, NOW_NS + 4 * DAY_NS + HOUR_NS),
    )


def test_a_life_knows_the_gap_before_it_and_those_before_that() -> None:
    store = MemoryStore()
    first = Lives(store, NOW_NS)
    assert first.ages == NO_GAPS, "a new store"
    first.note(NOW_NS + DAY_NS)
    gap = Gap(NOW_NS + DAY_NS, NOW_NS + 9 * DAY_NS)
    assert Lives(store, NOW_NS + 9 * DAY_NS).ages == Ages((gap,))
    assert Lives(store, NOW_NS + 9 * DAY_NS + 1).ages == Ages((gap,)), "of a life that ended at once"


def test_a_life_whose_clock_went_back_is_known_at_once() -> None:
    store = MemoryStore()
    Lives(store, NOW_NS).note(NOW_NS)
    Lives(store, NOW_NS - 8 * DAY_NS)
    assert Lives(store, NOW_NS + 1).ages == Ages((Gap(NOW_NS - 8 * DAY_NS, NOW_NS + 1),))


def test_a_start_like_any_other_writes_nothing() -> None:
    store = MemoryStore()
    Lives(store, NOW_NS)
    assert store.get(records.META, records.CLOCK_KEY) is None
    Lives(store, NOW_NS).note(NOW_NS)
    Lives(store, NOW_NS + COUNTED_GAP_NS)
    assert records.decode_clock(store.get(records.META, records.CLOCK_KEY) or b"") == (NOW_NS, NO_GAPS)


def test_a_gap_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    Lives(store, NOW_NS).note(NOW_NS)
    Lives(store, NOW_NS + COUNTED_GAP_NS).note(NOW_NS + DAY_NS)
    assert not caplog.records
    Lives(store, NOW_NS + 2 * DAY_NS)
    assert "this machine's clock is 86400.0 s past the last that this store knows of it" in caplog.text


def test_where_no_clock_was_noted_the_newest_result_says_what_it_was() -> None:
    store = MemoryStore()
    store.write([Write(records.EXPIRY, records.expiry_key(NOW_NS + age, 1), b"") for age in (-DAY_NS, -HOUR_NS)])
    assert Lives(store, NOW_NS).ages == Ages((Gap(NOW_NS - HOUR_NS, NOW_NS),))


def test_a_newest_result_that_cannot_be_read_keeps_nothing_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise StoreDamagedError("Corruption: block checksum mismatch")

    store = MemoryStore()
    monkeypatch.setattr(store, "scan_back", damaged)
    assert Lives(store, NOW_NS).ages == NO_GAPS


def test_a_note_is_due_each_minute() -> None:
    lives = Lives(MemoryStore(), NOW_NS)
    assert not lives.is_note_due(NOW_NS + NOTE_NS - 1)
    assert lives.is_note_due(NOW_NS + NOTE_NS)
    lives.note(NOW_NS + NOTE_NS)
    assert not lives.is_note_due(NOW_NS + NOTE_NS + 1)


def test_the_row_of_the_clock() -> None:
    ages = Ages((Gap(1, 2), Gap(5, 1 << 63)))
    assert records.decode_clock(records.encode_clock(7, ages)) == (7, ages)
    for row in (b"", bytes(7), bytes(16)):
        with pytest.raises(ValueError, match="row of the clock"):
            records.decode_clock(row)
