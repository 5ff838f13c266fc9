"""The ledger under every order, repetition and loss of ACKs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from services.scheduler.core.ledger import Change, Ledger, Reservation, Verdict
from services.scheduler.core.messages import Holding
from tests.support.effort import examples

NAMES = st.sampled_from([f"r{number}" for number in range(6)])
CHANNELS = st.sampled_from(["interactive", "batch"])
BLOCKS = st.integers(0, 70)
SEQS = st.integers(0, 12)
CAPACITY = 100


def state(ledger: Ledger) -> object:
    """Return everything the ledger knows, comparable."""
    reservations = {name: fields(ledger.reservation(name)) for name in ledger}
    return ledger.free_blocks, ledger.overcommitted_blocks, ledger.sequences, ledger.held_by_channel(), reservations


def fields(reservation: Reservation | None) -> dict[str, object]:
    """Return all that a reservation says."""
    return {name: getattr(reservation, name) for name in dir(reservation) if not name.startswith("_")}


class AnyOrder(RuleBasedStateMachine):
    """Any operation with any arguments at any time: the law holds, and what is refused changes nothing."""

    ahead_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY, self.ahead_blocks)

    @rule(name=NAMES, channel=CHANNELS, blocks=st.integers(1, 70), sequences=st.integers(1, 4))
    def book(self, name: str, channel: str, blocks: int, sequences: int) -> None:
        before = state(self.ledger)
        balance = self.ledger.free_blocks - self.ledger.overcommitted_blocks
        ahead_blocks = self.ahead_blocks if len(self.ledger) else 0
        room = blocks <= max(balance, min(balance + ahead_blocks, CAPACITY)) and name not in self.ledger
        assert self.ledger.book(name, channel, blocks, sequences) == room
        if room:
            assert self.ledger.free_blocks - self.ledger.overcommitted_blocks == balance - blocks >= -ahead_blocks
        else:
            assert state(self.ledger) == before

    @rule(name=NAMES, seq=SEQS, blocks=BLOCKS, grows=st.booleans())
    def settle(self, name: str, seq: int, blocks: int, grows: bool) -> None:
        before, free = state(self.ledger), self.ledger.free_blocks
        shortfall = self.ledger.overcommitted_blocks
        change = self.ledger.settle(name, seq, blocks, grows)
        self.refused_changes_nothing(change, before)
        assert not (grows and change.verdict is Verdict.NO_ROOM), "the engine has the block already"
        if change.verdict is Verdict.APPLIED:
            balance = self.ledger.free_blocks - self.ledger.overcommitted_blocks
            assert balance == free - shortfall + change.refunded_blocks
            reservation = self.ledger.reservation(name)
            assert reservation is not None
            assert (reservation.held_blocks, reservation.seq) == (blocks, seq)

    @rule(name=NAMES, seq=SEQS)
    def release(self, name: str, seq: int) -> None:
        before = state(self.ledger)
        held = self.ledger.reservation(name)
        held_blocks = held.held_blocks if held else 0
        change = self.ledger.release(name, seq)
        self.refused_changes_nothing(change, before)
        if change.verdict is Verdict.APPLIED:
            assert change.refunded_blocks == held_blocks
            assert self.ledger.release(name, seq + 1).verdict is Verdict.LATE

    @rule(name=NAMES, other=NAMES)
    def rename(self, name: str, other: str) -> None:
        before, held = state(self.ledger), self.ledger.reservation(name)
        free = self.ledger.free_blocks
        possible = held is not None and other not in self.ledger
        assert self.ledger.rename(name, other) == possible
        if not possible:
            assert state(self.ledger) == before
        else:
            assert name not in self.ledger
            assert self.ledger.reservation(other) is held
            assert self.ledger.free_blocks == free

    @rule(name=NAMES, channel=CHANNELS, blocks=st.integers(0, 150), seq=SEQS)
    def adopt(self, name: str, channel: str, blocks: int, seq: int) -> None:
        self.ledger.adopt([Holding(name, channel, blocks, seq)])

    @rule()
    def drop(self) -> None:
        held = self.ledger.held_blocks
        assert sum(self.ledger.drop().values()) == held
        assert self.ledger.free_blocks == CAPACITY

    def refused_changes_nothing(self, change: Change, before: object) -> None:
        if change.verdict is not Verdict.APPLIED:
            assert state(self.ledger) == before
            assert change.refunded_blocks == 0

    @invariant()
    def law(self) -> None:
        assert self.ledger.audit() == []
        assert self.ledger.free_blocks >= 0


class AnyOrderAhead(AnyOrder):
    """The same with blocks that may be booked ahead of what is free."""

    ahead_blocks = 15


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestAnyOrderAhead = AnyOrderAhead.TestCase
TestAnyOrderAhead.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


class Wires(RuleBasedStateMachine):
    """Workers that keep the contract over wires that lose, repeat and reorder: no credit is minted or lost."""

    acks = Bundle("acks")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.seq = 0
        self.final: dict[str, int] = {}
        self.booked = 0

    @rule(target=acks, blocks=st.integers(1, 40), channel=CHANNELS, shrinks=st.lists(st.integers(-60, 40), max_size=3))
    def grant(self, blocks: int, channel: str, shrinks: list[int]) -> object:
        """One request's ACKs: what it holds shrinks, or grows with its output."""
        self.booked += 1
        name = f"r{self.booked}"
        if not self.ledger.book(name, channel, blocks):
            return multiple()
        sent = []
        for shrink in shrinks:
            self.seq += 1
            blocks = max(blocks - shrink, 0)
            sent.append((name, self.seq, blocks))
        self.seq += 1
        self.final[name] = self.seq
        return multiple(*sent, (name, self.seq, None))

    @rule(ack=acks)
    def deliver(self, ack: tuple[str, int, int | None]) -> None:
        name, seq, blocks = ack
        gone = name not in self.ledger
        change = self.ledger.release(name, seq) if blocks is None else self.ledger.settle(name, seq, blocks, True)
        if gone:
            assert change.verdict is Verdict.LATE

    @rule(ack=consumes(acks))
    def lose(self, ack: tuple[str, int, int | None]) -> None:
        """The ACK is never delivered (again)."""

    @invariant()
    def law(self) -> None:
        assert self.ledger.audit() == []

    def teardown(self) -> None:
        for name, seq in self.final.items():
            self.ledger.release(name, seq)
        assert (self.ledger.free_blocks, len(self.ledger), self.ledger.sequences) == (CAPACITY, 0, 0)


TestWires = Wires.TestCase
TestWires.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@given(order=st.permutations([("settle", 1, 30), ("settle", 2, 12), ("release", 3, 0)]), repeats=st.integers(1, 3))
def test_every_order_of_one_requests_acks_ends_with_everything_free(
    order: list[tuple[str, int, int]], repeats: int
) -> None:
    ledger = Ledger(CAPACITY)
    assert ledger.book("r", "batch", 64)
    refunded = 0
    for kind, seq, blocks in order * repeats:
        change = ledger.settle("r", seq, blocks) if kind == "settle" else ledger.release("r", seq)
        refunded += change.refunded_blocks
    assert refunded == 64
    assert ledger.free_blocks == CAPACITY


@given(
    order=st.permutations([("r1", 1, 40), ("r1", 2, 90), ("r1", 3, 0), ("r2", 1, 30), ("r2", 2, 60), ("r2", 3, 0)]),
    repeats=st.integers(1, 2),
)
def test_growth_beyond_the_pool_is_named_and_paid_off_in_every_order(
    order: list[tuple[str, int, int]], repeats: int
) -> None:
    ledger = Ledger(CAPACITY)
    assert ledger.book("r1", "batch", 20)
    assert ledger.book("r2", "interactive", 20)
    newest = {"r1": (0, 20), "r2": (0, 20)}
    for name, seq, blocks in order * repeats:
        change = ledger.settle(name, seq, blocks, True) if blocks else ledger.release(name, seq)
        if seq > newest[name][0]:
            assert change.verdict is Verdict.APPLIED
            newest[name] = (seq, blocks)
        held = sum(blocks for _, blocks in newest.values())
        assert (ledger.held_blocks, ledger.overcommitted_blocks) == (held, max(held - CAPACITY, 0))
        assert ledger.audit() == []
        if ledger.overcommitted_blocks:
            assert not ledger.book("r3", "batch", 1)
    assert ledger.free_blocks == CAPACITY


@given(first=st.integers(1, 50), second=st.integers(1, 50), late=st.sampled_from(["settle", "release"]))
def test_an_ack_of_an_earlier_grant_does_not_touch_a_later_one(first: int, second: int, late: str) -> None:
    ledger = Ledger(CAPACITY)
    ledger.book("r", "batch", first)
    ledger.release("r", 7)
    ledger.book("r", "batch", second)
    change = ledger.settle("r", 6, 0) if late == "settle" else ledger.release("r", 7)
    assert change.verdict is Verdict.DUPLICATE
    assert ledger.held_blocks == second
