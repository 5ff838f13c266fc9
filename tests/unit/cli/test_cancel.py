"""`penstock cancel --batch` against a queue in memory: what is cancelled already is no error, a wrong name is one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.queue.v1 import queue_pb2
from services.telemetry import Telemetry
from tests.support.fake_queue import FakeQueue
from tests.support.serving import Peer, serving, text
from tests.support.shell import Shell


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with serving(Telemetry(None)) as peer:
        yield peer


@pytest.fixture
def shell(peer: Peer) -> Shell:
    return Shell(f"127.0.0.1:{peer.port}", FakeQueue())


async def test_a_batch_is_cancelled(peer: Peer, shell: Shell) -> None:
    first, _ = await peer.submit(text(batch="b"), text(batch="b"))
    await (await peer.work()).claim(first)
    ran = await shell.run("cancel", "--batch", "b")
    assert (ran.status, ran.out, ran.err) == (0, "1 cancelled, 1 being aborted\n", "")


async def test_a_cancel_that_is_said_again_is_no_error(peer: Peer, shell: Shell) -> None:
    await peer.submit(text(batch="b"), text(batch="b"))
    # The answer of this one was lost.
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    ran = await shell.run("cancel", "--batch", "b")
    assert (ran.status, ran.out, ran.err) == (0, "0 cancelled, 0 being aborted\n", "")


async def test_a_batch_of_which_nobody_knows_is_an_error(peer: Peer, shell: Shell) -> None:
    await peer.submit(text(batch="another"))
    ran = await shell.run("cancel", "--batch", "b")
    assert (ran.status, ran.err) == (1, "penstock: nothing is known of the batch 'b'\n")
