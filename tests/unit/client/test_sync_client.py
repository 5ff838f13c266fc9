"""The blocking client: what its callers' own code does stays on the callers' side of its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import penstock
from penstock.fields import RequestFields
from penstock.queue.v1 import queue_pb2 as pb
from penstock.source_thread import AHEAD, SourceThread
from tests.support.fake_queue import SOON_S, FakeQueue, served
from tests.support.waiting import wait_for, wait_for_async


def source_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-source"]


def test_what_is_submitted_may_come_from_the_same_client(client: penstock.SyncClient, queue: FakeQueue) -> None:
    """Each prompt is the answer to the one before."""

    def chain() -> Iterator[RequestFields]:
        for number in range(3):
            yield {"prompt": client.generate(prompt=f"p {number}").text}

    assert len(list(client.submit_many(chain()))) == 3
    assert {"P 0", "P 1", "P 2"} <= {request.text for request in queue.requests}


def test_a_source_that_waits_holds_up_neither_acks_nor_other_calls(client: penstock.SyncClient) -> None:
    acked = threading.Event()

    def waits() -> Iterator[RequestFields]:
        yield {"prompt": "first"}
        assert acked.wait(SOON_S)
        yield {"prompt": "second"}

    acks = client.submit_many(waits())
    assert next(acks).index == 0
    assert client.stats().dead == 1
    acked.set()
    assert [ack.index for ack in acks] == [1]


def test_a_source_that_fails_says_so_once_what_it_gave_is_acked(client: penstock.SyncClient) -> None:
    def gone() -> Iterator[RequestFields]:
        yield {"prompt": "a"}
        raise LookupError("the file is gone")

    acks = client.submit_many(gone())
    assert next(acks).index == 0
    with pytest.raises(LookupError, match="the file"):
        next(acks)


def test_a_request_that_cannot_be_made_names_its_field(client: penstock.SyncClient, queue: FakeQueue) -> None:
    wanted: list[Any] = [
        {"prompt": "a"},
        {"prompt": "b", "shiny": 1},
        {"prompt": "c"},
        {"prompt": "d", "n": "many"},
        None,
    ]
    acks = sorted(client.submit_many(wanted), key=lambda ack: ack.index)
    assert [ack.error and (ack.error.code, ack.error.param) for ack in acks] == [
        None, ("unknown_field", "shiny"), None, ("invalid_type", "n"), ("invalid_type", "request"),
    ]  # fmt: skip
    assert acks[1].error is not None
    assert acks[1].error.message.startswith("shiny: there is no such field")
    assert [request.text for request in queue.requests] == ["a", "c"]


def test_a_source_may_change_what_it_has_given(client: penstock.SyncClient, queue: FakeQueue) -> None:
    def reused() -> Iterator[RequestFields]:
        fields: RequestFields = {}
        for number in range(100):
            fields["prompt"] = f"p {number}"
            yield fields

    assert len(list(client.submit_many(reused()))) == 100
    assert [request.text for request in queue.requests] == [f"p {number}" for number in range(100)]


def test_requests_join_the_trace_of_who_submits_them(client: penstock.SyncClient, queue: FakeQueue) -> None:
    def current() -> str:
        return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)

    with TracerProvider().get_tracer("test").start_as_current_span("caller"):
        list(client.submit_many({"prompt": current()} for _ in range(1)))
        assert [request.text for request in queue.requests] == [current()], "the source sees what its caller does"
        assert queue.requests[0].traceparent.split("-")[1] == current()


async def test_a_source_is_read_only_so_far_ahead() -> None:
    given, taken, furthest = 0, 0, 0

    def endless() -> Iterator[int]:
        nonlocal given, furthest
        while True:
            furthest = max(furthest, given - taken)
            given += 1
            yield given

    source = SourceThread(endless(), asyncio.get_running_loop())

    async def ahead() -> bool:
        return given > AHEAD

    await wait_for_async(ahead, "all that is read ahead")
    async for item in source.items():
        taken += 1
        assert item == taken
        if taken == 1000:
            break
    source.leave()
    assert furthest <= 2 * AHEAD + 1, "a batch that is handed on, one that waits, and the item in hand"


def test_who_takes_no_more_acks_ends_the_source(client: penstock.SyncClient) -> None:
    taken = itertools.count()
    acks = client.submit_many(RequestFields(prompt=f"p {number}") for number in taken)
    next(acks)
    acks.close()  # type: ignore[attr-defined]
    wait_for(lambda: not source_threads(), "the source's thread to end")


def test_who_takes_no_more_acks_does_not_wait_for_the_source(client: penstock.SyncClient) -> None:
    forever = threading.Event()

    def waits() -> Iterator[RequestFields]:
        yield {"prompt": "p"}
        forever.wait()

    try:
        for ack in client.submit_many(waits()):
            assert ack.index == 0
            break
        assert source_threads()
    finally:
        forever.set()
    wait_for(lambda: not source_threads(), "the source's thread to end")


class Interrupting(FakeQueue):
    """Acks nothing, and has Ctrl-C pressed once there is something to ack."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self.interrupt = interrupt

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for frame in request_iterator:
            if frame.HasField("open"):
                yield pb.SubmitResponse(open=pb.SubmitOpen(store_id="fake"))
            else:
                self.interrupt()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_ctrl_c_while_acks_are_awaited() -> None:
    def press() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with served(Interrupting(press)) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        for _ in range(10):  # when the interrupted step ends is a matter of chance
            with pytest.raises(KeyboardInterrupt):
                list(client.submit_many([{"prompt": "p"}]))
        assert client.stats().dead == 1, "the client goes on"


def test_a_signal_that_comes_just_as_a_wait_begins_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a signal does not wake the wait; here its handler is made to run with the next step of Python."""
    pressed = threading.Event()
    waits = concurrent.futures.Future.result

    def deaf(future: concurrent.futures.Future[object], timeout: float | None = None) -> object:
        try:
            return waits(future, timeout)
        except TimeoutError:
            pressed.set()
            raise KeyboardInterrupt from None

    with served(Interrupting(lambda: None)) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        monkeypatch.setattr("penstock.sync_client.LOOK_S", 0.05)
        monkeypatch.setattr(concurrent.futures.Future, "result", deaf)
        with pytest.raises(KeyboardInterrupt):
            list(client.submit_many([{"prompt": "p"}]))
        monkeypatch.undo()
    assert pressed.is_set()


def test_a_call_may_take_longer_than_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sync_client.LOOK_S", 0.0)
    with served(FakeQueue()) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        assert client.stats().dead == 1
    with penstock.SyncClient("127.0.0.1:1", retry_for_s=0.2) as client, pytest.raises(penstock.Unavailable):
        client.stats()


def test_a_client_that_cannot_be_made_leaves_no_thread() -> None:
    before, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with pytest.raises(penstock.PenstockError, match="out of range"):
        penstock.SyncClient("nowhere:99999")
    # Threads and files of tests before this one may end meanwhile.
    assert set(threading.enumerate()) <= before
    assert len(os.listdir("/proc/self/fd")) <= files
