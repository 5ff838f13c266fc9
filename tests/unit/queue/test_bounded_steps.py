"""No step takes time with what waits: what comes to much is done in several."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.queue.v1 import queue_pb2
from services.queue.core.effects import Effect, TokensWatched
from services.queue.core.entry import DEFAULT_TENANT, request_id_of
from services.queue.core.messages import WatchTokens
from services.telemetry import Telemetry
from tests.support.looks import Looked, are_not_counted, looks
from tests.support.modules import COMPILED
from tests.support.queueing import Queue, meta, working
from tests.support.serving import serving, text


@are_not_counted
def test_who_watches_the_tokens_of_a_large_batch_costs_what_runs_of_it() -> None:
    queue = working(Queue())
    names = queue.submit(*[meta(batch="b") for _ in range(3000)])
    queue.machine.book.batches[DEFAULT_TENANT, "b"] = {Looked(seq) for seq in range(1, 3001)}
    assert queue.claim(1, names[7])
    for on in (True, False):
        told: list[Effect] = []
        message = WatchTokens(on, 1, None, (DEFAULT_TENANT, "b"))
        assert looks(lambda: told.extend(queue.step(message))) < 100  # noqa: B023  # it is called here
        assert told == [TokensWatched(1, names[7], on)]


@pytest.mark.skipif(COMPILED, reason="compiled code has its constants built in")
async def test_the_names_of_a_large_batch_are_made_for_one_commit_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0

    def make(store_id: str, seq: int) -> str:
        nonlocal made
        made += 1
        return request_id_of(store_id, seq)

    monkeypatch.setattr("services.queue.core.machine.ENDED_AT_ONCE", 2)
    monkeypatch.setattr("services.queue.admin.ENDED_AT_ONCE", 2)
    monkeypatch.setattr("services.queue.admin.request_id_of", make)
    async with serving(Telemetry(None)) as peer:
        await peer.submit(*(text(batch="b") for _ in range(7)))
        committer, made_before = peer.service.committer, []
        ask = committer.ask

        async def ask_and_note(item: Any) -> Any:
            made_before.append(made)
            return await ask(item)

        monkeypatch.setattr(committer, "ask", ask_and_note)
        done = await peer.stub.Cancel(queue_pb2.CancelRequest(batch="b"))
    assert (done.cancelled, list(done.not_cancelled)) == (7, [])
    assert made_before == [0, 2, 4, 5]
