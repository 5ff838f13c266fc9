"""What a channel pays for its requests, and how long they are expected to hold their blocks."""

from __future__ import annotations

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Pool
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.hold_time import HoldTime
from services.scheduler.core.sharing.holds import LEAST_HOLD_NS, Holds
from services.scheduler.core.sharing.lately import MEMORY_HOLDS, Lately
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import SECOND_NS, Rig, announced, shape


class Book:
    """One channel that has work, one worker, and what is held there."""

    def __init__(self, engine: m.EngineShape | None = None) -> None:
        rig = Rig({"a": Share()})
        rig.open("w", engine or shape())
        self.worker = rig.worker("w")
        self.channel = Channel("a", Share(), 1)
        entry = Entry("waits")
        entry.announce(announced("waits", "a", 1), 0)
        self.channel.enter(entry)
        self.account = self.channel.account(self.worker.group.pool)
        self.account.deficit_block_ns = self.start = 1_000 * SECOND_NS
        self.holds = Holds()

    def paid(self) -> int:
        return self.start - self.account.deficit_block_ns


def test_a_channel_pays_for_what_was_held_for_as_long_as_it_was() -> None:
    book = Book()
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0)
    assert book.paid() == 10 * LEAST_HOLD_NS, "nothing is known: the least"
    book.holds.changed(book.worker, "r", 4, 2 * SECOND_NS)
    assert book.paid() == 20 * SECOND_NS, "longer than expected: what was used"
    book.holds.ended(book.worker, "r", m.ReleaseCause.COMPLETED, 5 * SECOND_NS)
    assert book.paid() == (20 + 12) * SECOND_NS
    assert book.holds.cost_block_ns(book.account, 3) == 15 * SECOND_NS, "the next are expected to take as long"


def test_what_was_paid_too_much_comes_back_at_the_end() -> None:
    book = Book()
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0)
    book.holds.ended(book.worker, "r", m.ReleaseCause.COMPLETED, SECOND_NS // 10)
    assert book.paid() == SECOND_NS
    book.holds.granted(book.worker, "q", book.account, 10, 0, SECOND_NS)
    book.holds.ended(book.worker, "q", m.ReleaseCause.COMPLETED, SECOND_NS)
    assert book.paid() == SECOND_NS + 10 * LEAST_HOLD_NS, "no grant is free"


def test_sequences_are_paid_for_where_they_are_the_larger_part_of_the_worker() -> None:
    book = Book(shape(100, max_num_seqs=10))
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0, sequences=4)
    assert book.paid() == 40 * LEAST_HOLD_NS, "four of ten sequences are as much as forty of a hundred blocks"
    book.holds.changed(book.worker, "r", 35, SECOND_NS)
    assert book.paid() == 40 * SECOND_NS
    book.holds.changed(book.worker, "r", 60, 2 * SECOND_NS)
    assert book.paid() == 80 * SECOND_NS
    book.holds.ended(book.worker, "r", m.ReleaseCause.COMPLETED, 3 * SECOND_NS)
    assert book.paid() == (80 + 60) * SECOND_NS, "it has grown beyond that"


def test_a_head_that_saves_or_waits_to_has_paid_for_its_sequences() -> None:
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(100, max_num_seqs=10))
    rig.announce("a", 1)
    rig.wait(1_000)
    rig.finish(rig.grants[0])
    rig.announce("a", 1, n=8)
    rig.announce("a", 1, n=5)
    rig.announce("b", 1, n=6)
    arbiter = rig.machine._arbiter
    saving = arbiter._savings.on(rig.worker("w"))
    assert saving is not None
    assert saving.paid_block_ns == 50 * SECOND_NS
    assert [deposit.paid_block_ns for deposit in arbiter._deposits] == [60 * SECOND_NS]


def test_before_it_is_known_on_which_worker_a_request_costs_the_least_that_it_may() -> None:
    rig = Rig({"a": Share()})
    for name, capacity, sequences in (("few", 1_000, 10), ("many", 2_000, 100), ("some", 500, 10)):
        rig.open(name, shape(capacity, max_num_seqs=sequences))
    group = rig.worker("few").group
    assert (group.charged_blocks(1, 2), group.charged_blocks(50, 2)) == (40, 50)
    assert [rig.worker(name).charged_blocks(1, 2) for name in ("few", "many", "some")] == [200, 40, 100]
    assert rig.worker("few").charged_blocks(1, 11) == 1_000, "it takes no more than all"
    rig.tell(m.WorkerClosed(rig.worker("many").epoch))
    rig.wait(60_000)
    rig.tell(m.Tick())
    assert group.charged_blocks(1, 2) == 100


def test_a_grant_that_came_back_unclaimed_costs_nothing_and_tells_nothing() -> None:
    book = Book()
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0)
    book.holds.ended(book.worker, "r", m.ReleaseCause.UNCLAIMED, 9 * SECOND_NS)
    assert (book.paid(), book.holds.known) == (0, False)


def test_a_lost_epoch_is_paid_up_to_its_end() -> None:
    book = Book()
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0)
    book.holds.drop(book.worker, 3 * SECOND_NS)
    assert book.paid() == 30 * SECOND_NS


@pytest.mark.parametrize(
    ("blocks", "seconds"), [(0, 0), (10, 0.46875), (20, 0.9375), (50, 22.5), (99, 59.25), (200, 60)]
)
def test_what_each_channel_holds_comes_home_in_its_own_time(blocks: int, seconds: float) -> None:
    book = Book()
    quick, slow = book.account, Channel("slow", Share(), 1).account(book.worker.group.pool)
    quick.hold_time.observe(SECOND_NS)
    slow.hold_time.observe(60 * SECOND_NS)
    for number in range(10):
        book.holds.granted(book.worker, f"quick-{number}", quick, 2, 0, 0)
        book.holds.granted(book.worker, f"slow-{number}", slow, 9, 0, 0)
        book.holds.changed(book.worker, f"slow-{number}", 8, 0)
    book.holds.granted(book.worker, "ended", slow, 70, 0, 0)
    book.holds.ended(book.worker, "ended", m.ReleaseCause.UNCLAIMED, SECOND_NS)
    assert book.holds.expected_ns(book.worker, blocks) == pytest.approx(seconds * SECOND_NS)


def test_a_hold_time_follows_what_it_is_told_and_its_cautious_value_is_above() -> None:
    time = HoldTime()
    assert time.cautious_ns is None
    for number in range(200):
        time.observe(900 + 200 * (number % 2))
    assert 950 <= time.mean_ns <= 1050
    assert time.cautious_ns is not None
    assert time.cautious_ns >= 1100


def test_what_was_used_lately_is_remembered_for_one_to_two_windows() -> None:
    lately, hold_ns = Lately(0), 10
    window_ns = MEMORY_HOLDS * hold_ns
    lately.note(7, 2, window_ns - 1, hold_ns)
    assert lately.peak_blocks(window_ns, hold_ns) == 7
    assert lately.peak_blocks(2 * window_ns - 1, hold_ns) == 7
    assert lately.peak_blocks(2 * window_ns, hold_ns) == 0


def test_what_ran_beyond_its_estimate_is_owed_in_full_while_there_is_work_and_one_charge_of_it_after_a_pause() -> None:
    book = Book()
    book.account.hold_time.observe(SECOND_NS)
    book.account.deficit_block_ns = 20 * SECOND_NS
    book.holds.granted(book.worker, "r", book.account, 10, 0, 0)
    book.holds.ended(book.worker, "r", m.ReleaseCause.COMPLETED, 60 * SECOND_NS)
    assert book.account.deficit_block_ns == -580 * SECOND_NS
    (line,) = book.channel.lines.values()
    entry = line.head()
    assert entry is not None
    book.channel.leave(entry)
    assert book.account.deficit_block_ns == -580 * SECOND_NS
    book.channel.enter(entry)
    assert book.account.deficit_block_ns == -10 * SECOND_NS, "nobody waited for it meanwhile"


@pytest.mark.parametrize("cause", [m.ReleaseCause.UNCLAIMED, m.ReleaseCause.RECALLED])
def test_credits_that_come_back_unclaimed_say_nothing_about_hold_times(cause: m.ReleaseCause) -> None:
    """The queue was away for a minute: the channel's requests do not take one for that, nor does it pay for it."""
    rig = Rig({"a": Share(), "b": Share()})
    rig.open("w", shape(capacity_blocks=10))
    rig.announce("a", 10)
    channel = rig.machine.channel("a")
    rig.wait(60_000)
    rig.release(rig.grants[0], cause)
    assert not channel.account(rig.worker("w").group.pool).hold_time.known


@pytest.mark.parametrize(
    "cause", [m.ReleaseCause.CLAIM_REFUSED, m.ReleaseCause.LEASE_LOST, m.ReleaseCause.REJECTED, m.ReleaseCause.FAILED]
)
def test_what_ends_before_its_prompt_was_counted_says_nothing_about_hold_times(cause: m.ReleaseCause) -> None:
    """Forty were cancelled while their grants were on their way: what runs takes a minute all the same."""
    rig = Rig({"a": Share()})
    rig.open("w", shape())
    rig.announce("a", 10)
    rig.wait(60_000)
    rig.finish(rig.grants[0])
    hold_time = rig.machine.channel("a").account(rig.worker("w").group.pool).hold_time
    for _ in range(40):
        rig.announce("a", 10)
        rig.wait(2)
        rig.tell(m.Gone(rig.grants[-1].request_id, m.GoneReason.ENDED))
        rig.release(rig.grants[-1], cause)
    assert hold_time.mean_ns == 60 * SECOND_NS
    rig.announce("a", 10)
    rig.settle(rig.grants[-1], 10)
    rig.release(rig.grants[-1], cause)
    assert hold_time.mean_ns < 60 * SECOND_NS, "this one ran"


def test_a_channel_pays_for_what_its_prompt_was_settled_to() -> None:
    """Not for what was booked before it was counted: that came home at once, for others to use."""
    rig = Rig({"a": Share()})
    rig.open("w", shape())
    rig.announce("a", 50)
    (grant,) = rig.grants
    rig.settle(grant, 2)
    rig.wait(1_000)
    rig.finish(grant)
    paid_block_ns = -rig.machine.channel("a").account(rig.worker("w").group.pool).deficit_block_ns
    assert SECOND_NS < paid_block_ns <= 2 * SECOND_NS, "two blocks for a second, less what a round gave"


def test_what_a_worker_brings_to_a_new_scheduler_is_paid_for_from_then_on() -> None:
    """Nobody knows since when it has run; its worker's stream that breaks again changes nothing of that."""
    rig = Rig({"a": Share()})
    brought = [m.Holding("old", "a", 10, 1)]
    rig.open("w", shape(), brought)
    account = rig.machine.channel("a").account(rig.worker("w").group.pool)
    rig.wait(4_000)
    epoch = rig.open("w", shape(), brought)
    rig.wait(6_000)
    rig.tell(m.CompletionAck(epoch, epoch, "old", 2, m.ReleaseCause.COMPLETED))
    assert account.hold_time.mean_ns == 10 * SECOND_NS
    assert -account.deficit_block_ns == 100 * SECOND_NS


def test_a_stream_that_breaks_ends_at_what_it_used_whatever_is_not_brought_along() -> None:
    rig = Rig({"a": Share()})
    rig.open("w", shape())
    rig.announce("a", 30, 20)
    rig.tell(*[m.Gone(grant.request_id, m.GoneReason.CLAIMED) for grant in rig.grants])
    pool = rig.worker("w").group.pool
    rig.wait(1_000)
    kept = rig.grants[0]
    # The ACK that settled it was lost with the stream.
    epoch = rig.open("w", shape(), [m.Holding(kept.request_id, "a", 10, 5)])
    account = rig.machine.channel("a").account(pool)
    assert account.running == 1
    rig.wait(9_000)
    rig._seq = 10
    rig.finish(kept.replace(epoch=epoch))
    assert account.hold_time.mean_ns == 10 * SECOND_NS
    paid_block_ns = account.gained_block_ns - account.deficit_block_ns
    assert paid_block_ns == pytest.approx((30 + 20 + 9 * 10) * SECOND_NS, rel=0.01)


def test_a_channel_without_work_saves_nothing() -> None:
    """What it has in hand when its line ends, and what comes back later, would let it go on alone when it returns."""
    channel, pool = Channel("a", Share(), 1), Pool()
    account, entry = channel.account(pool), Entry("waits")
    entry.announce(announced("waits", "a", 1), 0)
    channel.enter(entry)
    account.deficit_block_ns = 50
    account.refund(20)
    assert account.deficit_block_ns == 70, "it has work"
    channel.leave(entry)
    assert account.deficit_block_ns == 0
    account.pay(30)
    account.refund(50)
    assert account.deficit_block_ns == 0
