"""When the scheduler hears that a running request has grown: with company, and no later than a report is due."""

from __future__ import annotations

from penstock.scheduler.v1 import scheduler_pb2 as s
from services.scheduler.core.messages import Grant
from services.scheduler.wire import grant, worker_opened
from services.worker.core import messages as m
from services.worker.core.peers import GROWTH_WAIT_NS
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.engine import EngineShape
from services.worker.wire import credits_open, granted

INTERVAL_NS = 20_000_000
SIZES = Sizes(capacity_blocks=60, blocks_total=64, block_size=16, max_model_len=512)
LEASE_NS = 10**15


class Told:
    """A session, and what it tells the scheduler. Reports have been told of nothing that changes at `now_ns` 0."""

    def __init__(self, *names: str, interval_ns: int = INTERVAL_NS, sizes: Sizes = SIZES) -> None:
        self.session = Session(sizes)
        for message in (m.SchedulerReached(), m.SchedulerUp(7, interval_ns), m.QueueReached()):
            self.session.step(message, 0)
        self.session.step(m.QueueUp(LEASE_NS, 100), 0)
        for name in names:
            self.start(name)
        self.at(0)

    def start(self, name: str) -> list[m.Effect]:
        self.session.step(m.Granted(name, "batch", 2, True, 1, 2), 0)
        self.session.step(m.Delivered(m.Lease(name, 1, 1), 1, 200, False), 0)
        return self.at(0, m.Tokenized(f"{name}.1", 30))

    def grow(self, name: str, tokens: int) -> None:
        assert not told(self.session.step(m.EngineProgress(f"{name}.1", tokens), 0))

    def at(self, now_ns: int, *messages: m.Message) -> list[m.Effect]:
        effects = [effect for message in messages for effect in self.session.step(message, now_ns)]
        return told([*effects, *self.session.step(m.Tick(), now_ns)])


def told(effects: list[m.Effect]) -> list[m.Effect]:
    return [e for e in effects if isinstance(e, m.SendTokenizerAck | m.SendCompletionAck | m.SendReport)]


def shown(effects: list[m.Effect]) -> list[str]:
    return [
        "report" if isinstance(e, m.SendReport) else f"{e.request_id}:{getattr(e, 'held_blocks', 'done')}"
        for e in effects
        if isinstance(e, m.SendTokenizerAck | m.SendCompletionAck | m.SendReport)
    ]


def test_growth_waits_until_a_report_is_due_and_a_report_is_due_for_it() -> None:
    one = Told("a")
    assert one.session.due_ns(1) == LEASE_NS // 3
    one.grow("a", 20)
    assert one.session.due_ns(1) == INTERVAL_NS
    assert shown(one.at(INTERVAL_NS - 1)) == []
    assert shown(one.at(INTERVAL_NS)) == ["a:4", "report"]
    assert one.session.due_ns(INTERVAL_NS) == LEASE_NS // 3


def test_growth_waits_no_longer_than_a_step_or_two_however_seldom_reports_are() -> None:
    one = Told("a", interval_ns=10_000_000_000)
    one.grow("a", 20)
    assert one.session.due_ns(1) == GROWTH_WAIT_NS
    assert shown(one.at(GROWTH_WAIT_NS)) == ["a:4", "report"]


def test_growth_goes_with_another_ack_and_the_report_with_both() -> None:
    one = Told("a")
    one.grow("a", 20)
    assert shown(one.start("b")) == ["a:4", "b:2", "report"]


def test_of_a_run_that_grew_twice_the_newest_is_told_in_the_order_of_sequence_numbers() -> None:
    one = Told("a", "b")
    for name, tokens in (("a", 20), ("b", 20), ("a", 40)):
        one.grow(name, tokens)
    effects = one.at(INTERVAL_NS)
    assert shown(effects) == ["b:4", "a:5", "report"]
    numbers = [effect.seq for effect in effects if isinstance(effect, m.SendTokenizerAck)]
    assert numbers == sorted(numbers)


def test_what_a_run_grew_by_is_not_told_once_it_has_ended() -> None:
    one = Told("a")
    one.grow("a", 20)
    assert shown(one.at(1, m.EngineFinished("a.1", 21, 0))) == ["a:done", "report"]


def test_a_later_grant_of_the_request_is_not_taken_for_the_run_before_it() -> None:
    one = Told("a")
    one.grow("a", 20)
    one.session.step(m.Granted("a", "batch", 2, True, 2, 2), 1)
    assert "a:4" not in shown(one.at(INTERVAL_NS, m.EngineFinished("a.1", 21, 0)))


def test_the_inventory_tells_how_many_completions_a_request_has() -> None:
    one = Told()
    one.session.step(m.Granted("a", "batch", 6, True, 1, 2), 0)
    one.session.step(m.Delivered(m.Lease("a", 1, 1), 3, 200, False), 0)
    one.at(0, m.Tokenized("a.1", 30))
    one.session.step(m.SchedulerDown(), 1)
    assert one.session.step(m.SchedulerReached(), 1) == [m.OpenCredits((m.Holding("a", "batch", 6, 1, 3),))]


def test_the_grant_tells_it_before_the_prompt_has_come() -> None:
    one = Told()
    message = s.SchedulerToWorker.FromString(
        grant(Grant(7, "w", "a", "batch", 6, True, 1, "", 0, 2, None, completions=3), "")
    )
    one.session.step(granted(message.grant), 0)
    one.session.step(m.SchedulerDown(), 1)
    assert one.session.step(m.SchedulerReached(), 1) == [m.OpenCredits((m.Holding("a", "batch", 6, 0, 3),))]


def test_the_inventory_tells_what_goes_first() -> None:
    one = Told()
    message = s.SchedulerToWorker.FromString(
        grant(Grant(7, "w", "a", "batch", 6, True, 1, "", 0, 2, None, guaranteed=True), "")
    )
    one.session.step(granted(message.grant), 0)
    one.session.step(m.SchedulerDown(), 1)
    (opened,) = one.session.step(m.SchedulerReached(), 1)
    assert isinstance(opened, m.OpenCredits)
    said = credits_open("w", "i", EngineShape("test", 64, 16, 512, 8, 0, "tiny"), 60, opened)
    (told,) = worker_opened(said, 1).inventory
    assert told.guaranteed


def test_the_inventory_tells_what_is_on_its_last_attempt() -> None:
    one = Told()
    for name, last in (("a", True), ("b", False)):
        message = s.SchedulerToWorker.FromString(
            grant(Grant(7, "w", name, "batch", 6, True, 3, "", 0, 2, None, last_attempt=last), "")
        )
        one.session.step(granted(message.grant), 0)
    one.session.step(m.SchedulerDown(), 1)
    (opened,) = one.session.step(m.SchedulerReached(), 1)
    assert isinstance(opened, m.OpenCredits)
    said = credits_open("w", "i", EngineShape("test", 64, 16, 512, 8, 0, "tiny"), 60, opened)
    assert [told.last_attempt for told in worker_opened(said, 1).inventory] == [True, False]


def test_a_new_stream_hears_of_growth_by_the_inventory_alone() -> None:
    one = Told("a")
    one.grow("a", 20)
    one.session.step(m.SchedulerDown(), 1)
    assert one.session.step(m.SchedulerReached(), 1) == [m.OpenCredits((m.Holding("a", "batch", 4, 2),))]
    assert shown(one.at(INTERVAL_NS, m.SchedulerUp(8, INTERVAL_NS))) == ["report"]


def test_what_holds_as_much_as_it_ever_can_grows_no_more_and_says_so() -> None:
    one = Told("a", sizes=SIZES._replace(lookahead_tokens=5, most_blocks=4))
    effects = one.session.step(m.EngineProgress("a.1", 30), 0)
    assert [effect.tokens for effect in effects if isinstance(effect, m.TellAt)] == [0]
    (ack,) = [effect for effect in one.at(INTERVAL_NS) if isinstance(effect, m.SendTokenizerAck)]
    assert (ack.held_blocks, ack.reserved_output_tokens) == (4, 200)
