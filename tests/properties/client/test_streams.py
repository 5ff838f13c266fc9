"""Wherever the streams break, every request is acked once, every result and token is seen once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.request.v1.request_pb2 import TokenDelta
from penstock.watching import TokenPositions
from tests.support.fake_queue import FakeQueue, serving


@pytest.mark.parametrize("seed", range(25))
async def test_breaks_lose_and_repeat_nothing(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 700)
    queue = FakeQueue()
    queue.break_submit_after_acks, queue.break_watch_after_results = draw.randint(0, count), draw.randint(0, count)
    queue.refuse_submits = draw.randint(0, 3)
    async with serving(queue) as address, penstock.Client(address, retry_for_s=30) as client:
        requests: list[penstock.RequestFields] = [{"prompt": f"p {i}", "batch": "b"} for i in range(count)]
        acks = [ack async for ack in client.submit_many(requests)]
        results = [result async for result in client.watch("b")]
    assert sorted(ack.index for ack in acks) == list(range(count))
    assert len(queue.requests) == count
    assert [result.request_id for result in results] == [result.request_id for result in queue.results]


def test_requests_whose_results_never_come_are_forgotten_and_those_that_go_on_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.watching.MAX_POSITIONS", 10)
    positions = TokenPositions()
    for number in range(200):
        assert positions.advance(TokenDelta(request_id=f"deleted-{number}", attempt=1, token_ids=[1], text="a"))
        again = TokenDelta(request_id="goes on", attempt=1, token_ids=range(number + 1), text="a" * (number + 1))
        assert positions.advance(again)
        assert (list(again.token_ids), again.offset, again.text) == ([number], number, "a")
        assert len(positions._seen) <= 10


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    resumes=st.lists(st.integers(0, 7), max_size=5),
    attempts=st.integers(1, 3),
)
def test_tokens_sent_again_after_a_reconnect_are_seen_once(
    lengths: list[int], resumes: list[int], attempts: int
) -> None:
    positions = TokenPositions()
    total = sum(lengths)

    def delta(attempt: int, start: int, end: int) -> TokenDelta:
        text = "".join(chr(ord("a") + token % 26) for token in range(start, end))
        return TokenDelta(request_id="r", attempt=attempt, offset=start, token_ids=range(start, end), text=text)

    for attempt in range(1, attempts + 1):
        edges = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        tokens: list[int] = []
        text = ""
        for begun in [0, *(min(resume, len(lengths)) for resume in resumes), 0]:
            # A stream begins with everything so far in one delta; the steps follow, and what was overtaken again.
            sent = [delta(attempt, 0, edges[begun])] if begun else []
            sent += [delta(attempt, a, b) for a, b in zip(edges[begun:], edges[begun + 1 :], strict=False)]
            for one in sent[: len(sent) if begun == 0 else begun]:
                if positions.advance(one):
                    assert one.offset == len(tokens), "joins without a gap"
                    tokens += one.token_ids
                    text += one.text
        assert tokens == list(range(total))
        assert text == delta(attempt, 0, total).text
