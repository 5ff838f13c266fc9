"""Requests for one model do not hold up those for another in the same channel."""

from __future__ import annotations

import os
from typing import Any

import pytest

from services.queue.core import lines
from services.queue.core.lines import Line
from services.scheduler.core import messages as m
from services.scheduler.core.fleet import MOST_SERVED_MODELS
from services.scheduler.core.sharing.places import Places
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.windows import SHARED_REQUESTS
from tests.support.scheduling import Rig, announced, shape

POLICIES = ["virtual-channels", "predictive"]


class Fed(Rig):
    """A rig whose requests come from the line of a queue, as its windows let them."""

    def __init__(self, policy: str) -> None:
        super().__init__({"batch": Share()}, policy)
        self.line = Line()
        self.models: dict[int, str] = {}
        self.take_windows(self.effects)

    def take_windows(self, effects: list[m.Effect]) -> None:
        """Do as the queue does when it is told a window."""
        for effect in effects:
            if isinstance(effect, m.SetWindow):
                self.line.set_served(effect.served)
                self.line.set_limit(effect.limit)

    def tell(self, *messages: m.Input) -> list[m.Effect]:
        effects = super().tell(*messages)
        if hasattr(self, "line"):
            self.take_windows(effects)
        return effects

    def submit(self, model: str, count: int) -> None:
        for _ in range(count):
            seq = len(self.models) + 1
            self.models[seq] = model
            self.line.enter(seq, 0, model)
        self.feed()

    def feed(self) -> None:
        """Announce what the windows let through, until they let nothing more."""
        while seqs := list(self.line.announce()):
            self.tell(*(announced(f"r{seq}", "batch", 5, seq, model=self.models[seq]) for seq in seqs))

    def finish(self, grant: m.Grant) -> None:
        seq = int(grant.request_id[1:])
        self.line.leave(seq, self.models[seq])
        super().finish(grant)
        self.feed()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backlog_for_one_model_leaves_the_workers_of_another_their_work(policy: str) -> None:
    rig = Fed(policy)
    rig.open("a", shape(max_num_seqs=8), model="a")
    rig.open("b", shape(max_num_seqs=8), model="b")
    rig.submit("a", 20_000)
    rig.submit("b", 10)
    done = 0
    while done < 40:
        rig.wait(100)
        rig.finish(rig.grants[done])
        done += 1
    granted = [rig.models[int(name[1:])] for name in rig.granted]
    assert granted.count("b") == 10
    assert granted.index("b") <= 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["", "m", "alias"])
def test_what_somebody_serves_is_granted_however_much_waits_for_made_up_models(
    policy: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_BEYOND", 100)
    rig = Fed(policy)
    for number in range(20):
        rig.submit(f"made-up-{number}", 64)
    rig.submit(model, 3)
    most = lines.MOST_WINDOWS * 64 + 100
    assert (rig.granted, rig.line.announced) == ([], most)
    rig.open("w", shape(max_num_seqs=2), aliases=("alias",))
    rig.feed()
    rig.finish(rig.grants[0])
    rig.line.forget_announcements()
    rig.tell(m.QueueClosed(), m.QueueOpened(("batch",)))
    rig.submit(model, 1)
    rig.finish(rig.grants[1])
    assert [rig.models[int(name[1:])] for name in rig.granted] == [model] * 4
    assert rig.line.bounded == most


def told(rig: Rig, *messages: m.Input) -> list[tuple[str, ...]]:
    """Feed messages and return the served models of each window told."""
    return [effect.served for effect in rig.tell(*messages) if isinstance(effect, m.SetWindow)]


def test_the_queue_is_told_which_models_somebody_serves() -> None:
    rig = Rig({"batch": Share()})
    rig.open("a", shape(), model="a", aliases=("also",))
    assert told(rig, m.QueueOpened(("batch", "chat"))) == [("", "a", "also")] * 2
    epoch = rig.open("b", shape(max_num_seqs=1), model="b", aliases=("a",))
    assert rig.effects[-1] == m.SetWindow("chat", 20_002, ("", "a", "also", "b"))
    rig.open("c", shape(max_num_seqs=0), model="b", aliases=("a",))
    assert not isinstance(rig.effects[-1], m.SetWindow), "nothing new"
    assert told(rig, m.WorkerClosed(epoch)) == [("", "a", "also", "b")] * 2, "it may come back"
    assert told(rig, m.WorkerClosed(3), m.WorkerClosed(1)) == [("", "a", "also", "b")] * 2
    rig.wait(60_000)
    assert told(rig, m.Tick()) == [()] * 2
    assert told(rig, m.Tick()) == []
    rig.open("d", shape(max_num_seqs=1), model="d")
    assert rig.effects[-1] == m.SetWindow("chat", 64, ("", "d"))


def test_the_names_that_a_window_tells_are_bounded() -> None:
    rig = Rig({"batch": Share()})
    for number in range(MOST_SERVED_MODELS // 50):
        rig.open(f"w{number}", shape(), model=f"m{number:02}", aliases=tuple(f"m{number:02}-{n}" for n in range(60)))
    (served,) = told(rig, m.QueueOpened(("batch",)))
    assert len(served) == MOST_SERVED_MODELS
    assert served == tuple(sorted(served))
    assert {"", "m00", "m15-59"} <= set(served), "those that came first"


@pytest.mark.parametrize("policy", POLICIES)
def test_made_up_models_are_looked_at_once(policy: str) -> None:
    rig = Rig({"batch": Share()}, policy)
    rig.open("a", shape(max_num_seqs=8), model="a")
    for number in range(300):
        rig.announce("batch", 5, model=f"made-up-{number}")
    names = rig.announce("batch", 5, 5, model="a")
    assert rig.granted == names
    looked_at = [line.model for line, _ in rig.machine.channel("batch").heads()]
    rig.announce("batch", 5, model="made-up-7")
    rig.finish(rig.grants[0])
    assert [line.model for line, _ in rig.machine.channel("batch").heads()] == looked_at == []
    assert not [effect for effect in rig.tell(m.Tick()) if isinstance(effect, m.AuditFailed)]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_for_a_model_are_granted_when_a_worker_serves_it(policy: str) -> None:
    rig = Rig({"batch": Share()}, policy)
    rig.open("a", shape(), model="a")
    (first,) = rig.announce("batch", 5, model="b")
    (gone,) = rig.announce("batch", 5, model="c")
    assert rig.granted == []
    rig.tell(m.Gone(gone, m.GoneReason.ENDED))
    rig.open("b", shape(), model="b")
    assert rig.granted == [first]
    rig.open("c", shape(), model="c")
    (again,) = rig.announce("batch", 5, model="c")
    assert rig.granted == [first, again]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_head_that_saves_starts_though_one_for_another_name_came_before_it(policy: str) -> None:
    rig = Rig({"batch": Share()}, policy)
    rig.open("w", aliases=("alias",))
    rig.tell(announced("r1", "batch", 63, 1, model="m"))
    rig.tell(announced("r2", "batch", 63, 2, model="m", priority=5))
    rig.tell(announced("r3", "batch", 51, 3, model="alias"))
    for done in range(3):
        rig.finish(rig.grants[done])
    assert rig.granted == ["r1", "r2", "r3"]


@pytest.mark.skipif("PENSTOCK_COMPILED" in os.environ, reason="nothing patches a compiled method")
def test_what_heads_have_paid_is_looked_at_only_where_it_may_be_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    could_hold = Places.could_hold

    def noted(*arguments: Any) -> bool:
        looked_at.append(arguments[3].request_id)
        return could_hold(*arguments)

    channels, models = ("a", "b", "c", "d"), ("k", "l", "m")
    rig = Rig({name: Share() for name in channels})
    for model in models:
        rig.open(model, shape(), model=model)
        for channel in channels:
            rig.announce(channel, 60, 60, model=model)
    rig.tell()
    deposits = rig.machine._arbiter._deposits
    assert len(list(deposits)) == 3 * len(models), "of four heads one saves on each worker"
    monkeypatch.setattr(Places, "could_hold", noted)
    worker = rig.worker("k")
    rig.tell(m.EngineReport(worker.epoch, worker.epoch, worker.ledger.free_blocks, 1))
    rig.announce("d", *[60] * 20, model="k")
    rig.tell()
    head = rig.machine.channel("d").lines["k"].head()
    assert head is not None
    assert set(looked_at) <= {head.request_id}
    rig.tell(m.DrainRequested("k"))
    assert {deposit.line.model for deposit in deposits} == {"l", "m"}, "those that wait for it have theirs back"


def test_a_head_that_leaves_has_back_what_it_paid_to_wait() -> None:
    channels = ("a", "b", "c", "d")
    rig = Rig({name: Share() for name in channels})
    rig.open("w")
    for channel in channels:
        rig.announce(channel, 60, 60)
    rig.tell()
    deposits = rig.machine._arbiter._deposits
    left = next(iter(deposits))
    assert len(left.line) == 2, "the one behind it is the first then"
    rig.tell(m.Gone(left.entry.request_id, m.GoneReason.ENDED))
    assert left.entry.request_id not in [each.entry.request_id for each in deposits]


def test_one_that_has_its_payment_back_for_an_older_one_pays_before_a_younger_in_another_pool() -> None:
    """Two that name no model have paid, one in each pool, when one for `x` comes that goes before both."""
    rig = Rig({"other": Share(), "capped": Share(1.0, 0.0, 0.9)})
    for model in ("x", "y"):
        rig.open(model, shape(100), model=model)
        rig.announce("other", 60, model=model)
        rig.announce("other", 90, model=model)
    first, second = rig.announce("capped", 50, 50)
    deposits = rig.machine._arbiter._deposits

    def paid() -> set[tuple[str, bool]]:
        return {(each.entry.request_id, each.account.pool.serves("x")) for each in deposits}

    assert paid() == {(first, True), (second, False)}
    (urgent,) = rig.announce("capped", 50, model="x", priority=-1)
    rig.tell()
    assert paid() == {(urgent, True), (first, False)}


def test_the_room_beside_those_aside_is_shared_by_the_lines_that_take_it() -> None:
    """Only a worker that is drained could hold any of them: three lines of which a whole window waits, and a short."""
    rig = Rig({"batch": Share(), "chat": Share()})
    for worker_id, blocks in (("small", 100), ("large", 400)):
        rig.open(worker_id, shape(blocks, 8), model="k", aliases=("l", "m", "n"))
    rig.tell(m.DrainRequested("large"))
    rig.announce("batch", 300, model="n")
    limits = []
    for model in ("k", "l", "m"):
        rig.announce("batch", *[300] * 3_000, model=model)
        rig.tell(m.Tick())
        rig.tell(m.Tick())  # not all of them are set aside in one pass
        limits.append(
            [each.limit for each in rig.effects if isinstance(each, m.SetWindow) and each.channel == "batch"][-1]
        )
    assert limits == [64 + 6_000, 64 + 6_000, 64 + SHARED_REQUESTS // 3]


@pytest.mark.parametrize(("gone", "looked_at"), [("small", False), ("large", True)])
def test_who_is_aside_is_looked_at_again_when_the_largest_worker_is_gone_and_no_other(
    gone: str, looked_at: bool
) -> None:
    """It would book all of a worker if none had what it books; a bound by bytes alone is proven to need little."""
    rig = Rig({"batch": Share()})
    for worker_id, blocks in (("small", 50), ("other", 50), ("large", 100)):
        rig.open(worker_id, shape(blocks))
    rig.tell(m.DrainRequested("large"))
    (name,) = rig.announce("batch", 0, prompt_bytes=80)
    line = rig.machine.channel("batch").lines[""]
    assert line.aside == 1
    rig.machine.step(m.WorkerClosed(rig.worker(gone).epoch), rig.now_ns)
    rig.wait(6_000)
    rig.machine.step(m.Tick(), rig.now_ns)
    rig.tell()
    assert (line.aside == 0) is looked_at
    assert (rig.granted == [name]) is looked_at
