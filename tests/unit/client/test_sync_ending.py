"""Nobody waits for the blocking client's thread where nothing runs there: no call is left without an answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import penstock
from penstock.tls import TlsError, TlsFiles
from tests.support.fake_queue import SOON_S, FakeQueue, served, serving
from tests.support.waiting import wait_for

SAID = "^the client was closed$"


@contextmanager
def in_a_thread(call: Callable[[], object]) -> Iterator[list[object]]:
    """Make a call in another thread; what comes of it is there at the end, and there must be something."""
    told: list[object] = []

    def calling() -> None:
        try:
            told.append(call())
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=calling, daemon=True)
    thread.start()
    yield told
    thread.join(SOON_S)
    assert told, "the call never returns"


def is_closed(told: list[object]) -> bool:
    return [(type(error), str(error)) for error in told] == [(penstock.Unavailable, "the client was closed")]


PROGRAMS = {
    "an iterator that was left is collected in the client's own thread": """
import gc
gc.disable()

class Response:
    def __init__(self, stream):
        self.stream, self.me = stream, self

with penstock.SyncClient(sys.argv[1], retry_for_s=5) as client:
    client.submit(prompt="a", batch="b")
    for stream in client.watch("b", follow=True), client.submit_many({"prompt": "p"} for _ in range(9)):
        next(stream)
        response = Response(stream)
        del stream, response
    client._loop.call_soon_threadsafe(gc.collect)
    assert client.stats().dead == 1
""",
    "a finalizer calls the client in its own thread": """
import threading
said = []

def finalize():
    for call in client.stats, client.close:
        try:
            call()
        except penstock.Unavailable as error:
            said.append(str(error))
    finalized.set()

finalized = threading.Event()
with penstock.SyncClient(sys.argv[1], retry_for_s=5) as client:
    client._loop.call_soon_threadsafe(finalize)
    assert finalized.wait(20)
    assert [text.startswith("a call would wait for itself") for text in said] == [True, True], said
    assert client.stats().dead == 1
""",
    "a child is forked": """
import os
with penstock.SyncClient(sys.argv[1], retry_for_s=5) as client:
    assert client.stats().dead == 1
    stream = client.watch("b", follow=True)
    child = os.fork()
    if not child:
        for call in client.stats, lambda: next(stream), lambda: next(client.submit_many([{"prompt": "p"}])):
            try:
                call()
            except penstock.Unavailable as error:
                assert "fork" in str(error), error
            else:
                os._exit(1)
        client.close()
        try:
            penstock.SyncClient(sys.argv[1])
        except penstock.PenstockError as error:
            assert "spawn or forkserver" in str(error), error
            os._exit(7)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.stats().dead == 1
""",
    "the process ends while an iterator is left": """
client = penstock.SyncClient(sys.argv[1], retry_for_s=5)
client.submit(prompt="a", batch="b")
stream = client.watch("b", follow=True)
next(stream)
""",
    "the process ends with a finalizer that calls": """
class Last:
    def __init__(self, client):
        self.client, self.refusal = client, penstock.Unavailable

    def __del__(self):
        try:
            self.client.stats()
        except self.refusal:
            self.client.close()
            print("refused")

client = penstock.SyncClient(sys.argv[1], retry_for_s=5)
client.stats()
last = Last(client)
del client
""",
    "an exit handler closes the client": """
import atexit
client = penstock.SyncClient(sys.argv[1], retry_for_s=5)
client.submit(prompt="a")
atexit.register(client.close)
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_goes_on_and_ends(program: str) -> None:
    text = f"import sys, penstock\n{PROGRAMS[program]}\nprint('done')"
    async with serving(FakeQueue()) as address:
        # Python 3.12 and newer warn of every fork beside threads.
        command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", text, address]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SOON_S)
    said = "done\nrefused\n" if "Last" in text else "done\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, said, "")


class Deaf(FakeQueue):
    """Answers no Stats."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def Stats(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.set()
        async for response in super().Watch(request, context):
            yield response


@pytest.mark.parametrize("call", [lambda client: client.stats(), lambda client: list(client.watch("b", follow=True))])
def test_who_waits_when_another_thread_closes_the_client_is_told(call: Callable[[penstock.SyncClient], object]) -> None:
    queue = Deaf()
    with served(queue) as address:
        client = penstock.SyncClient(address, retry_for_s=5)
        with in_a_thread(lambda: call(client)) as told:
            assert queue.asked.wait(SOON_S)
            client.close()
        assert is_closed(told), told


def test_who_pauses_before_another_attempt_is_told() -> None:
    client = penstock.SyncClient("127.0.0.1:1", retry_for_s=600)
    with in_a_thread(client.stats) as told:
        wait_for(lambda: "wait_or_raise" in _running(client), "the pause")
        client.close()
    assert is_closed(told), told


def _running(client: penstock.SyncClient) -> str:
    """Return what the tasks of a client are at."""
    tasks = asyncio.all_tasks(client._loop)
    return " ".join(frame.f_code.co_name for task in tasks for frame in _frames(task.get_coro()))


def _frames(coroutine: Any) -> Iterator[Any]:
    while getattr(coroutine, "cr_frame", None) is not None:
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def test_who_calls_as_the_loop_is_about_to_be_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    client = penstock.SyncClient("127.0.0.1:1", retry_for_s=5)
    close, heard = client._loop.close, []

    def late() -> None:
        with in_a_thread(client.stats) as told:
            pass
        heard.extend(told)
        close()

    monkeypatch.setattr(client._loop, "close", late)
    client.close()
    assert is_closed(heard), heard


def test_every_call_to_a_closed_client_says_so() -> None:
    client = penstock.SyncClient("127.0.0.1:1", retry_for_s=5)
    stream = client.watch("b")
    client.close()
    threads = set(threading.enumerate())
    for call in (
        client.stats,
        lambda: client.submit(prompt="p"),
        lambda: next(stream),
        lambda: list(client.watch("b")),
        lambda: list(client.submit_many([{"prompt": "p"}])),
    ):
        with pytest.raises(penstock.Unavailable, match=SAID):
            call()
    client.close()
    assert set(threading.enumerate()) <= threads, "no source was read"


def test_tls_is_as_the_caller_says() -> None:
    with pytest.raises(TlsError, match="nowhere"):
        penstock.SyncClient("127.0.0.1:1", tls=TlsFiles(ca="/nowhere/ca.pem"))
