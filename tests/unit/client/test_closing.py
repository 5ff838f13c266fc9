"""A client that is closed says so to all who use it; a client is used on one event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import penstock
from penstock import connection
from penstock.fields import RequestFields
from tests.support.fake_queue import FakeQueue, serving
from tests.support.waiting import wait_for_async

SAID = "^the client was closed$"


@pytest.fixture
async def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
async def client(queue: FakeQueue) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=60) as client:
        yield client


async def drained(items: AsyncGenerator[Any, None]) -> None:
    async for _ in items:
        pass


async def endless() -> AsyncIterator[RequestFields]:
    yield {"prompt": "p"}
    await asyncio.Event().wait()


OPEN: dict[str, Callable[[penstock.Client], Awaitable[object]]] = {
    "watch": lambda client: drained(client.watch("b", follow=True)),
    "events": lambda client: drained(client.events("b", follow=True, tokens=True)),
    "wire_results": lambda client: drained(client.wire_results("b")),
    "wire_events_of": lambda client: drained(client.wire_events_of(["r-0", "r-0"], tokens=True)),
    "submit_many": lambda client: drained(client.submit_many(endless())),
}
"""Calls that last."""

CALLS: dict[str, Callable[[penstock.Client], Awaitable[object]]] = {
    **OPEN,
    "submit": lambda client: client.submit(prompt="p"),
    "generate": lambda client: client.generate(prompt="p"),
    "result": lambda client: client.result("r-0"),
    "tokens": lambda client: drained(client.tokens("r-0")),
    "get": lambda client: client.get("r-0"),
    "cancel": lambda client: client.cancel("r-0"),
    "dead_letters": lambda client: drained(client.dead_letters()),
    "stats": lambda client: client.stats(),
    "fleet": lambda client: client.fleet(),
    "backup": lambda client: client.backup(),
}


async def opened(client: penstock.Client, queue: FakeQueue, name: str) -> asyncio.Task[object]:
    """Make a call that lasts; return its task once the queue has it."""
    queue.paused = True
    await client.submit(prompt="p")
    queue.submit_streams.clear()
    task = asyncio.ensure_future(OPEN[name](client))

    async def there() -> bool:
        return task.done() or bool(queue.watches or queue.followed) or len(queue.requests) == 2

    await wait_for_async(there, "the call to be open")
    assert not task.done()
    return task


@pytest.mark.parametrize("name", OPEN)
async def test_who_is_in_a_call_is_told(client: penstock.Client, queue: FakeQueue, name: str) -> None:
    task = await opened(client, queue, name)
    await client.close()
    async with asyncio.timeout(30):
        with pytest.raises(penstock.Unavailable, match=SAID):
            await task


async def watching(client: penstock.Client, queue: FakeQueue) -> tuple[AsyncGenerator[Any, None], asyncio.Task[Any]]:
    """Return a watch that is open at the queue, and the wait for its first result."""
    watch, count = client.watch("b", follow=True), len(queue.watches) + 1
    waiting = asyncio.ensure_future(anext(watch))

    async def open_there() -> bool:
        return len(queue.watches) == count

    await wait_for_async(open_there, "the watch")
    return watch, waiting


async def test_a_client_says_so_when_it_has_as_many_watches_as_it_may(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_WATCHES", 2)
    async with serving(queue) as address, penstock.Client(address, retry_for_s=0.1) as client:
        await watching(client, queue)
        watch, waiting = await watching(client, queue)
        with pytest.raises(penstock.Unavailable, match=r"^2 watches are open, the most of one client$"):
            await OPEN["watch"](client)
        assert [ack.index async for ack in client.submit_many([{"prompt": "p", "batch": "b"}])] == [0]
        await waiting
        await watch.aclose()
        await watching(client, queue)


async def test_who_waits_for_a_watch_to_end_is_told(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_WATCHES", 1)
    async with serving(queue) as address, penstock.Client(address, retry_for_s=3600) as client:
        _watch, held = await watching(client, queue)
        await client.submit(prompt="p", batch="b")
        await held  # whoever holds the place does something else now
        calls = [asyncio.ensure_future(OPEN["watch"](client)) for _ in range(3)]
        await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(30):
            for call in calls:
                with pytest.raises(penstock.Unavailable, match=SAID):
                    await call


async def test_who_is_cancelled_meanwhile_is_cancelled(client: penstock.Client, queue: FakeQueue) -> None:
    task = await opened(client, queue, "watch")
    closing = asyncio.create_task(client.close())
    task.cancel()
    await asyncio.wait([closing, task])
    assert task.cancelled()


@pytest.mark.parametrize("name", CALLS)
async def test_who_calls_later_is_told(client: penstock.Client, name: str) -> None:
    await client.close()
    async with asyncio.timeout(30):
        with pytest.raises(penstock.Unavailable, match=SAID):
            await CALLS[name](client)
    await client.close()


@pytest.mark.parametrize("name", ["stats", "watch", "submit", "submit_many", "result"])
async def test_who_pauses_before_another_attempt_is_told_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACKOFF_FIRST_S", 3600.0)
    monkeypatch.setattr(connection, "BACKOFF_MOST_S", 3600.0)
    paused = asyncio.Event()
    pause = connection.Connection.pause

    async def noted(self: connection.Connection, pause_s: float) -> None:
        paused.set()
        await pause(self, pause_s)

    monkeypatch.setattr(connection.Connection, "pause", noted)
    client = penstock.Client("127.0.0.1:1", retry_for_s=7200)
    calling = asyncio.ensure_future(CALLS[name](client))
    await paused.wait()
    await client.close()
    async with asyncio.timeout(30):
        with pytest.raises(penstock.Unavailable, match=SAID):
            await calling


async def test_a_collector_that_does_not_answer_holds_up_no_other_task(client: penstock.Client) -> None:
    entered, answers = threading.Event(), threading.Event()
    answered = []

    def export() -> None:
        entered.set()
        answered.append(answers.wait(60))

    client._tracer.close = export  # type: ignore[method-assign]
    closing = asyncio.create_task(client.close())

    async def exporting() -> bool:
        return entered.is_set()

    await wait_for_async(exporting, "the export")
    answers.set()
    await closing
    assert answered == [True]


OTHER_LOOPS = {
    "outside": """
client = penstock.Client("127.0.0.1:1", retry_for_s=0)
""",
    "in a loop that has ended": """
async def made():
    return penstock.Client("127.0.0.1:1", retry_for_s=0)
client = asyncio.run(made())
""",
}

TELL = """
async def told():
    for call in (client.stats(), client.submit(prompt="p"), client.result("r"), anext(client.watch("b"))):
        try:
            await asyncio.wait_for(call, 60)
        except Exception as error:
            print(type(error).__name__, str(error).partition(";")[0])
asyncio.run(told())
"""


@pytest.mark.parametrize("made", OTHER_LOOPS)
def test_a_client_of_another_event_loop_says_so(made: str) -> None:
    program = f"import asyncio, penstock\n{OTHER_LOOPS[made]}\n{TELL}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said = "PenstockError a Client belongs to the event loop it was made in"
    assert (ended.stdout.splitlines(), ended.returncode) == ([said] * 4, 0), ended.stderr


def test_a_client_made_where_there_is_no_event_loop_says_so() -> None:
    made: list[str] = []

    def make() -> None:
        try:
            penstock.Client("127.0.0.1:1", "127.0.0.1:1")
        except penstock.PenstockError as error:
            made.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert ["this thread has none" in said for said in made] == [True]
