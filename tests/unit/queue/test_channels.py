"""Channels that come and go while the queue runs."""

from __future__ import annotations

from services.queue.core.effects import Announce, BacklogReady, ChannelsChanged, Effect
from services.queue.core.messages import BacklogOpened, Claim, GiveBack, Reconfigure, SetWindow, WorkerOpened
from tests.support.queueing import RULES, Queue, meta


def told(effects: list[Effect]) -> list[tuple[str, ...]]:
    """Return the channels the scheduler was told of."""
    return [effect.channels for effect in effects if isinstance(effect, BacklogReady | ChannelsChanged)]


def announced(effects: list[Effect]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, Announce)]


def test_a_new_channel_is_told_and_gets_announced_within_its_window() -> None:
    queue = Queue()
    assert told(queue.open_backlog(1)) == [RULES.channels]
    assert told(queue.step(Reconfigure((*RULES.channels, "new")))) == [(*RULES.channels, "new")]
    (name,) = queue.submit(meta(channel="new"))
    assert announced(queue.step(SetWindow(1, "new", 5))) == [name]
    assert told(queue.step(Reconfigure((*RULES.channels, "new")))) == []


def test_without_a_scheduler_nobody_is_told_until_one_comes() -> None:
    queue = Queue()
    assert told(queue.step(Reconfigure((*RULES.channels, "new")))) == []
    assert told(queue.step(BacklogOpened(1))) == [(*RULES.channels, "new")]


def test_what_waits_in_a_removed_channel_is_announced_also_after_a_restart() -> None:
    queue = Queue()
    queue.open_backlog(1)
    queue.step(Reconfigure((*RULES.channels, "old")))
    (name,) = queue.submit(meta(channel="old"))
    assert told(queue.step(Reconfigure(RULES.channels))) == []
    queue.restart()
    assert told(queue.step(BacklogOpened(2))) == [(*RULES.channels, "old")]
    assert announced(queue.step(SetWindow(2, "old", 5))) == [name]


def test_what_comes_back_to_a_removed_channel_is_told_and_announced() -> None:
    """The queue restarts without the channel while a request of it runs; its worker hands it back later."""
    queue = Queue()
    queue.step(Reconfigure((*RULES.channels, "old")))
    (name,) = queue.submit(meta(channel="old"))
    queue.step(WorkerOpened(9, "w", "i", ()))
    lease = queue.claim(9, name)
    assert lease is not None
    queue.restart()
    assert told(queue.step(BacklogOpened(2))) == [RULES.channels]
    queue.step(WorkerOpened(10, "w", "i", (lease,)))
    assert told(queue.step(GiveBack(10, (lease,)))) == [(*RULES.channels, "old")]
    assert announced(queue.step(SetWindow(2, "old", 5))) == [name]
    assert queue.step(Claim(10, name))
