"""A link whose name another instance has: who gives up, and who goes on asking. And one whose peer does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.queue.v1 import queue_pb2 as q
from penstock.scheduler.v1 import scheduler_pb2 as s
from penstock.tls import Access
from services.rpc.names import NameTakenError
from services.worker.core import messages as m
from services.worker.links import QUEUE, SCHEDULER, Dialect, Link
from services.worker.name import Name
from tests.support.fake_peers import Peers, until

LARGE = s.WorkerToScheduler(leaving=s.Leaving(reason="x" * 60_000))


@pytest_asyncio.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    await peers.start()
    yield peers
    await peers.close()


class Asking:
    """A link to the scheduler that opens whenever it can."""

    def __init__(self, port: int, ask_s: float) -> None:
        dialect = Dialect("scheduler", m.SchedulerReached(), m.SchedulerDown(), SCHEDULER, "Credits", lambda _: None)
        self.name = Name(ask_s)
        self.let_in = self.name.at_scheduler.let_in
        self.link: Link[s.WorkerToScheduler] = Link(
            f"127.0.0.1:{port}", Access(), dialect, self._heard, self.name.at_scheduler, self.name.at_queue
        )
        self.task = asyncio.create_task(self.link.run())

    def _heard(self, message: m.Message) -> None:
        if isinstance(message, m.SchedulerReached):
            self.link.open(s.WorkerToScheduler(open=s.CreditsOpen(worker_id="w1", instance_id="i")))


async def test_an_instance_that_was_never_let_in_gives_up(peers: Peers) -> None:
    peers.scheduler.name_taken = True
    asking = Asking(peers.scheduler_port, ask_s=0.0)
    with pytest.raises(NameTakenError, match="another instance of 'w1' is connected"):
        await asking.task
    assert peers.scheduler.refused == 1
    assert not asking.let_in.is_set()


async def test_it_asks_for_a_while_because_the_other_may_be_gone(peers: Peers) -> None:
    peers.scheduler.name_taken = True
    asking = Asking(peers.scheduler_port, ask_s=600.0)
    await until(lambda: peers.scheduler.refused > 1, "a second question")
    peers.scheduler.name_taken = False
    await asyncio.wait_for(asking.let_in.wait(), 60)
    asking.task.cancel()


async def test_an_instance_that_was_let_in_goes_on_asking(peers: Peers) -> None:
    asking = Asking(peers.scheduler_port, ask_s=0.0)
    await asyncio.wait_for(asking.let_in.wait(), 60)
    peers.scheduler.name_taken = True
    peers.scheduler.hang_up()
    await until(lambda: peers.scheduler.refused > 1, "a second question")
    peers.scheduler.name_taken = False
    await until(lambda: len(peers.scheduler.opens) == 2, "the stream to open again")
    asking.task.cancel()


async def test_who_lost_its_name_at_the_queue_leaves_the_scheduler_to_the_other(peers: Peers) -> None:
    """Or, where both have asked there again, one would hold each stream, and neither do any work."""
    asking = Asking(peers.scheduler_port, ask_s=0.0)
    queue = Dialect("queue", m.QueueReached(), m.QueueDown(), QUEUE, "Work", lambda _: None)
    opening = q.WorkerToQueue(open=q.WorkOpen(worker_id="w1", instance_id="i"))
    claim = asking.name.at_queue
    work: Link[q.WorkerToQueue] = Link(
        f"127.0.0.1:{peers.queue_port}", Access(), queue, lambda _: work.open(opening), claim
    )
    working = asyncio.create_task(work.run())
    await asyncio.wait_for(claim.let_in.wait(), 60)
    await until(lambda: len(peers.scheduler.opens) == 1, "both streams")

    peers.queue.name_taken = True
    peers.queue.hang_up()
    await until(lambda: peers.queue.refused > 2 and not asking.link.streaming, "no stream at all")
    assert len(peers.scheduler.opens) == 1, "it does not ask there again"

    peers.queue.name_taken = False
    await until(lambda: len(peers.scheduler.opens) == 2, "both streams")
    working.cancel()
    asking.task.cancel()


async def test_a_peer_that_does_not_read_is_told_anew_and_costs_a_bounded_amount(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rpc.unread.MAX_UNSENT_BYTES", 1_000_000)
    monkeypatch.setattr("services.rpc.unread.UNREAD_LOOK_S", 0.05)
    asking = Asking(peers.scheduler_port, ask_s=0.0)
    link = asking.link
    await asyncio.wait_for(asking.let_in.wait(), 60)
    peers.scheduler.listens.clear()
    unread = link._outbox
    for _ in range(1000):  # of which gRPC takes some megabytes
        link.send(LARGE)
    await until(lambda: len(peers.scheduler.opens) == 2, "the stream to open again")
    assert (len(unread), unread.size_bytes) == (0, 0)
    peers.scheduler.listens.set()
    link.send(s.WorkerToScheduler(leaving=s.Leaving(reason="the next")))
    await until(lambda: "the next" in peers.scheduler.leaving, "what is said on the next stream")
    asking.task.cancel()


async def test_a_peer_that_reads_is_told_however_much_it_is(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new stream the queue is told at once all tokens of what is watched: it would never hear of anything else."""
    monkeypatch.setattr("services.rpc.unread.MAX_UNSENT_BYTES", 1_000)
    monkeypatch.setattr("services.rpc.unread.UNREAD_LOOK_S", 60.0)
    asking = Asking(peers.scheduler_port, ask_s=0.0)
    await asyncio.wait_for(asking.let_in.wait(), 60)
    for _ in range(100):
        asking.link.send(LARGE)
    await until(lambda: len(peers.scheduler.leaving) == 100, "all of it")
    assert len(peers.scheduler.opens) == 1
    asking.task.cancel()


async def test_a_frame_that_cannot_be_made_costs_the_stream_and_not_the_link(peers: Peers) -> None:
    """gRPC logs for nobody what raised in it, and has the reader of answers believe that it was cancelled."""

    def broken() -> bytes:
        raise OSError(5, "Input/output error")

    asking = Asking(peers.scheduler_port, ask_s=0.0)
    await asyncio.wait_for(asking.let_in.wait(), 60)
    asking.link.send_later(broken)
    await until(lambda: len(peers.scheduler.opens) == 2, "the stream to open again")
    assert not asking.task.done()
    asking.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking.task
