"""When disk space of deleted bodies is given back, and how much at once: the decisions by numbers alone."""

import pytest

from penstock.limits import MAX_MESSAGE_BYTES
from services.queue.storage.reclaim import (
    SEARCH_REST_AT_MOST_S,
    SEARCH_REST_S,
    WALKED_AT_MOST,
    Room,
    Step,
    Usage,
    is_walk_long,
    search_rest_s,
    step_for,
)

MIB = 1 << 20
PLENTY = 1 << 40
USAGE = Usage(rows=1000, deletions=0, table_bytes=MIB, blob_bytes=1000 * MIB, blob_files=10, garbage_bytes=0)


@pytest.mark.parametrize(
    ("usage", "settled", "is_low", "step"),
    [
        (USAGE, 0, True, Step.NOTHING),
        (USAGE._replace(deletions=10), 0, False, Step.NOTHING),  # 10 MiB, and 32 may be dead
        (USAGE._replace(deletions=10), 0, True, Step.COMPACT),
        (USAGE._replace(deletions=10), 10, True, Step.NOTHING),  # the last step left them
        (USAGE._replace(deletions=33), 0, False, Step.COMPACT),
        (USAGE._replace(deletions=33, table_bytes=400 * MIB), 0, False, Step.NOTHING),  # too much to write anew
        (USAGE._replace(deletions=33, table_bytes=400 * MIB), 0, True, Step.COMPACT),
        (USAGE._replace(deletions=1, table_bytes=400 * MIB), 0, True, Step.NOTHING),
        (USAGE._replace(rows=0, table_bytes=0, blob_bytes=0, deletions=9), 0, True, Step.NOTHING),  # all in memory
        (USAGE._replace(garbage_bytes=400 * MIB), 0, False, Step.NOTHING),
        (USAGE._replace(garbage_bytes=600 * MIB), 0, False, Step.RELOCATE),
        (USAGE._replace(garbage_bytes=400 * MIB, deletions=66), 0, False, Step.COMPACT),
        (USAGE._replace(garbage_bytes=600 * MIB, deletions=99), 0, False, Step.RELOCATE),  # which compacts as well
        (USAGE._replace(garbage_bytes=63 * MIB), 0, True, Step.RELOCATE),
        (USAGE._replace(garbage_bytes=62 * MIB), 0, True, Step.NOTHING),  # much would be moved for little
    ],
)
def test_steps(usage: Usage, settled: int, is_low: bool, step: Step) -> None:
    assert step_for(usage._replace(settled=settled), 32 * MIB, Room(PLENTY, is_low), False) is step


def test_little_is_moved_for_little() -> None:
    few, many = (USAGE._replace(blob_bytes=n * 1000 * MIB, blob_files=10 * n, garbage_bytes=33 * MIB) for n in (1, 3))
    for room, moves in ((Room(PLENTY, True), (False, False)), (Room(PLENTY, True, True), (True, False))):
        steps = [step_for(usage, 32 * MIB, room, False) for usage in (few, many)]
        assert [step is Step.RELOCATE for step in steps] == [*moves]


@pytest.mark.parametrize(
    ("usage", "moves"),
    [
        (USAGE._replace(blob_bytes=200 * MIB, garbage_bytes=8 * MIB), True),  # the rest of a large bound stays nowhere
        (USAGE._replace(blob_bytes=20 * MIB, garbage_bytes=MIB), True),
        (USAGE._replace(blob_bytes=20 * MIB, garbage_bytes=MIB - 1), False),
        (USAGE._replace(table_bytes=640 * MIB, garbage_bytes=16 * MIB), True),
        (USAGE._replace(table_bytes=1280 * MIB, garbage_bytes=16 * MIB), False),  # which are written anew as well
        (USAGE._replace(table_bytes=12800 * MIB, garbage_bytes=32 * MIB), True),  # as with room
    ],
)
def test_the_bound_is_not_for_a_disk_that_is_short_of_room(usage: Usage, moves: bool) -> None:
    step = step_for(usage, 32 * MIB, Room(PLENTY, True, True), False)
    assert (step is Step.RELOCATE) is moves


FULL = Room(60 * MIB, True, True, reserve_bytes=160 * MIB)


@pytest.mark.parametrize(
    ("usage", "step"),
    [
        (USAGE._replace(deletions=65), Step.COMPACT),
        (USAGE._replace(deletions=63), Step.NOTHING),
        (USAGE._replace(garbage_bytes=64 * MIB), Step.RELOCATE),
        (USAGE._replace(garbage_bytes=64 * MIB, blob_files=5), Step.NOTHING),  # 200 MiB each
        (USAGE._replace(garbage_bytes=63 * MIB), Step.NOTHING),
        (USAGE._replace(deletions=30, table_bytes=600 * MIB), Step.NOTHING),  # they may be of large rows
        (USAGE._replace(deletions=10, table_bytes=10**5 * MIB), Step.NOTHING),  # all of them would be written anew
    ],
)
def test_the_reserve_is_room_for_what_gives_more_back(usage: Usage, step: Step) -> None:
    mine, lent = FULL.parts()
    assert (mine, lent.is_lent, lent.step_bytes) == (FULL, True, int(0.9 * (60 + 160 - 96) * MIB))
    assert step_for(usage, 32 * MIB, lent, True) is step
    assert not is_walk_long(usage._replace(deletions=10**6), lent)


def test_the_reserve_is_lent_only_where_submits_are_refused() -> None:
    assert not any(part.is_lent for part in FULL._replace(is_full=False, kept_bytes=MIB).parts())
    assert not any(part.is_lent for part in FULL._replace(is_full=False).parts())
    assert not any(part.is_lent for part in FULL._replace(reserve_bytes=0).parts())


MIXED = Usage(10**6, deletions=80, table_bytes=280 * MIB, blob_bytes=320 * MIB, blob_files=10, garbage_bytes=0)


@pytest.mark.parametrize(
    ("usage", "settled", "is_low", "is_rested", "step"),
    [
        (MIXED, 0, True, True, Step.SEARCH),  # they may be all blobs there are
        (MIXED, 0, True, False, Step.NOTHING),
        (MIXED, 0, False, True, Step.NOTHING),
        (MIXED, 80, True, True, Step.NOTHING),
        (MIXED._replace(deletions=1), 0, True, True, Step.SEARCH),
        (MIXED._replace(blob_bytes=0), 0, True, True, Step.NOTHING),  # each less than 4 KiB
        (MIXED._replace(garbage_bytes=319 * MIB), 0, True, True, Step.RELOCATE),
        (MIXED._replace(garbage_bytes=319 * MIB, moves_blobs=False), 0, True, True, Step.NOTHING),
        (MIXED._replace(deletions=2000, blob_bytes=0), 0, True, True, Step.SEARCH),
        (MIXED._replace(deletions=0), 0, True, True, Step.NOTHING),
        (MIXED._replace(deletions=10**5), 0, True, True, Step.COMPACT),  # due by their mean size
        (MIXED._replace(deletions=10**5), 0, True, False, Step.COMPACT),
    ],
)
def test_any_deletion_may_be_of_a_large_row_where_room_is_short(
    usage: Usage, settled: int, is_low: bool, is_rested: bool, step: Step
) -> None:
    assert step_for(usage._replace(settled=settled), 32 * MIB, Room(PLENTY, is_low), is_rested) is step


def test_searches_in_vain_get_rare() -> None:
    rests_s = [0.0]
    for _ in range(8):
        rests_s.append(search_rest_s(rests_s[-1], MAX_MESSAGE_BYTES - 1, True))
    assert rests_s[1:] == [SEARCH_REST_S * 2**n for n in range(6)] + [SEARCH_REST_AT_MOST_S] * 2
    assert search_rest_s(SEARCH_REST_AT_MOST_S, MAX_MESSAGE_BYTES, True) == SEARCH_REST_S
    assert search_rest_s(480.0, 0, False) == 480.0, "what gave way has not found everything yet"
    assert search_rest_s(480.0, MAX_MESSAGE_BYTES, False) == SEARCH_REST_S


def test_no_more_is_moved_than_there_is_room_for() -> None:
    usage = USAGE._replace(garbage_bytes=600 * MIB)  # ten files of 100 MiB
    assert usage.relocated_share(Room(PLENTY)) == 0.25
    assert 0.1 < usage.relocated_share(Room(200 * MIB)) < 0.25
    assert usage.relocated_share(Room(120 * MIB)) == 0.0
    assert usage._replace(blob_files=2).relocated_share(Room(PLENTY)) == 0.5, "of few files one"
    assert step_for(usage, 32 * MIB, Room(200 * MIB, True), False) is Step.RELOCATE
    assert step_for(usage, 32 * MIB, Room(120 * MIB, True), False) is Step.NOTHING
    assert usage._replace(moves_blobs=False).relocated_share(Room(PLENTY)) == 0.0


def test_tables_are_not_replaced_at_once() -> None:
    usage = USAGE._replace(garbage_bytes=600 * MIB, table_bytes=10_000 * MIB)
    assert usage.relocated_share(Room(240 * MIB)) == pytest.approx((180 - 64) / 1000)
    assert usage._replace(upper_bytes=80 * MIB).relocated_share(Room(240 * MIB)) == pytest.approx((180 - 80) / 1000)
    assert usage._replace(upper_bytes=81 * MIB).relocated_share(Room(240 * MIB)) == 0.0, "one compaction takes them all"
    assert usage._replace(upper_bytes=81 * MIB).can_move(Room(240 * MIB)), "after that"
    assert not usage.can_move(Room(200 * MIB))


def test_what_compacts_fits() -> None:
    usage = USAGE._replace(table_bytes=10_000 * MIB)
    assert [usage.fits(Room(free * MIB)) for free in (85, 86)] == [False, True], (
        "a piece, in three quarters of what is free"
    )
    assert [usage._replace(upper_bytes=90 * MIB).fits(Room(free * MIB)) for free in (119, 120)] == [False, True]
    assert usage._replace(table_bytes=3 * MIB).fits(Room(4 * MIB))
    assert usage._replace(table_bytes=MIB, upper_bytes=MIB).relocated_share(Room(240 * MIB)) == pytest.approx(0.179)


@pytest.mark.parametrize(
    ("usage", "settled", "free_bytes", "is_long"),
    [
        (USAGE._replace(deletions=WALKED_AT_MOST), 0, PLENTY, True),
        (USAGE._replace(deletions=WALKED_AT_MOST), 1, PLENTY, False),  # the last compaction left one
        (USAGE._replace(deletions=WALKED_AT_MOST, rows=10**6), 0, PLENTY, False),  # too much to write anew
        (USAGE._replace(deletions=125_000, rows=10**6), 0, PLENTY, True),
        (USAGE._replace(deletions=WALKED_AT_MOST), 0, MIB, False),  # no room for it
    ],
)
def test_walks_that_are_worth_a_compaction(usage: Usage, settled: int, free_bytes: int, is_long: bool) -> None:
    assert is_walk_long(usage._replace(settled=settled), Room(free_bytes)) is is_long


@pytest.mark.parametrize(
    ("usage", "share", "pieces"),
    [
        (USAGE, 0.0, 1),
        (USAGE, 0.1, 1),
        (USAGE, 0.25, 2),  # of two files no half
        (USAGE._replace(blob_files=100), 0.25, 4),  # 250 MiB, 64 each
        (USAGE._replace(blob_files=100, table_bytes=400 * MIB), 0.25, 3),  # as much as tables are worth
        (USAGE._replace(blob_files=100, garbage_bytes=900 * MIB), 0.25, 2),  # no more lives than 100 MiB
    ],
)
def test_what_is_moved_is_moved_in_pieces(usage: Usage, share: float, pieces: int) -> None:
    assert usage.pieces(share) == pieces


def test_what_is_below_the_watermark_is_used_for_what_is_worth_it_with_room_too() -> None:
    above, all_of_it = Room(300 * MIB, True, kept_bytes=256 * MIB).parts()
    assert (above.step_bytes, all_of_it.step_bytes) == (33 * MIB, 225 * MIB)
    for garbage_bytes, moves in ((400 * MIB, False), (600 * MIB, True)):
        usage = USAGE._replace(garbage_bytes=garbage_bytes)
        assert step_for(usage, 32 * MIB, above, True) is Step.NOTHING
        assert (step_for(usage, 32 * MIB, all_of_it, True) is Step.RELOCATE) is moves
    full = Room(300 * MIB, True, True)
    assert full.parts() == (full,)
    assert full.step_bytes == 270 * MIB
