"""The blocking client with a bound: what comes too late raises TimeoutError, and an iteration goes on after it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock
from penstock.fields import RequestFields
from tests.support.fake_queue import SOON_S, FakeQueue
from tests.support.waiting import wait_for

SHORT_S = 0.05


def end_all(client: penstock.SyncClient, queue: FakeQueue) -> None:
    """End what waits at the queue, which is served by another loop: at its next call."""
    for request in queue.requests:
        queue.paused = False
        result = queue.answer(request)
        result.request_id, result.batch = request.request_id, request.batch
        queue.results.append(result)
    client.submit(prompt="wakes those who watch")


def test_a_call_that_is_late_is_given_up_and_its_request_goes_on(client: penstock.SyncClient, queue: FakeQueue) -> None:
    queue.paused = True
    with pytest.raises(TimeoutError, match=r"^there is no answer after 0\.05 s$"):
        client.within(SHORT_S).generate(prompt="a", idempotency_key="k")
    name = client.submit(prompt="a", idempotency_key="k")
    wait_for(lambda: not queue.followed or name in queue.left, "nobody to wait for the result any more")
    end_all(client, queue)
    assert client.within(SOON_S).result(name).text == "A"


STEPS: dict[str, Callable[[penstock.SyncClient], Iterator[Any]]] = {
    "watch": lambda client: client.watch("b"),
    "events": lambda client: client.events("b"),
    "tokens": lambda client: client.tokens("r-0"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_that_is_late_goes_on(client: penstock.SyncClient, queue: FakeQueue, kind: str) -> None:
    queue.paused = True
    client.submit(prompt="a", batch="b")
    steps = STEPS[kind](client.within(SHORT_S))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            next(steps)
    end_all(client, queue)
    assert [item.text for item in patiently(steps)] == ["A"]
    assert len(queue.watches) + len(queue.follows) == 1


def patiently(steps: Iterator[Any]) -> Iterator[Any]:
    """Yield all that comes, however late."""
    while True:
        try:
            yield next(steps)
        except TimeoutError:
            continue
        except StopIteration:
            return


def test_acks_go_on_after_a_source_that_paused(client: penstock.SyncClient) -> None:
    go_on = threading.Event()

    def pauses() -> Iterator[RequestFields]:
        yield {"prompt": "a"}
        assert go_on.wait(SOON_S)
        yield {"prompt": "b"}

    acks = client.within(SHORT_S).submit_many(pauses())
    first = next(patiently(acks))
    with pytest.raises(TimeoutError):
        next(acks)
    go_on.set()
    assert [first.index, *(ack.index for ack in patiently(acks))] == [0, 1]


def test_an_iterator_that_is_left_at_a_late_step_is_closed(client: penstock.SyncClient, queue: FakeQueue) -> None:
    queue.paused = True
    name = client.submit(prompt="a")
    steps = client.within(SHORT_S).tokens(name)
    with pytest.raises(TimeoutError):
        next(steps)
    wait_for(lambda: name in queue.followed, "the request to be followed")
    del steps
    wait_for(lambda: name in queue.left and not client._open, "the request to be left")


def test_a_failure_is_raised_again_by_further_steps() -> None:
    with penstock.SyncClient("127.0.0.1:1", retry_for_s=0) as client:
        steps = client.watch("b")
        for _ in range(2):
            with pytest.raises(penstock.Unavailable, match="nothing answers"):
                next(steps)


def test_it_shares_the_end_with_the_client(client: penstock.SyncClient) -> None:
    bounded = client.within(SOON_S)
    assert bounded.stats().dead == 1
    client.close()
    with pytest.raises(penstock.Unavailable, match="the client was closed"):
        bounded.stats()


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, None])
def test_a_bound_is_above_0(client: penstock.SyncClient, timeout_s: Any) -> None:
    with pytest.raises(penstock.InvalidRequest, match="timeout_s: must be a number above 0"):
        client.within(timeout_s)
