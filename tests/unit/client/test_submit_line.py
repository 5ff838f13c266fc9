"""Single submits over one standing stream: shared, reopened, bounded, and none of them in another's way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import penstock
from penstock import submit_line
from penstock.errors import ANSWERED, ERROR_CODE
from penstock.limits import MAX_MESSAGE_BYTES, TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from tests.support.fake_queue import FakeQueue, serving
from tests.support.ports import free_port
from tests.support.waiting import wait_for_async


async def test_a_client_that_is_closed_before_its_stream_has_begun_leaves_nobody_waiting() -> None:
    client = penstock.Client("127.0.0.1:1", retry_for_s=0)
    submitting = asyncio.create_task(client.submit(prompt="x"))
    closing = asyncio.create_task(client.close())
    async with asyncio.timeout(30):
        with pytest.raises(penstock.Unavailable, match="the client was closed"):
            await submitting
        await closing


class Held(FakeQueue):
    """Can hold back its acks, and refuse what it is asked as a store that cannot write does."""

    def __init__(self) -> None:
        super().__init__()
        self.acks = asyncio.Event()
        self.acks.set()
        self.store_failures = 0
        self.revocations = 0
        """Submit streams that are ended as those of a key that is no longer good."""

    async def _accept(self, request: request_pb2.Request, tag: int) -> pb.SubmitAck:
        if self.store_failures:
            self.store_failures -= 1
            error = request_pb2.RequestError(code="store_unavailable", message="the store is away")
            return pb.SubmitAck(tag=tag, status=pb.SUBMIT_STATUS_UNAVAILABLE, error=error)
        ack = await super()._accept(request, tag)
        await self.acks.wait()
        return ack

    async def Submit(self, request_iterator: AsyncIterator[pb.SubmitRequest], context: Any) -> AsyncIterator[Any]:
        async for response in super().Submit(request_iterator, context):
            if self.revocations and response.HasField("acks"):
                self.revocations -= 1
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no longer good")
            yield response

    async def SubmitUnary(self, request: pb.SubmitUnaryRequest, context: Any) -> pb.SubmitUnaryResponse:
        response = await super().SubmitUnary(request, context)
        if response.acks[0].error.code == "store_unavailable":
            await context.abort(grpc.StatusCode.UNAVAILABLE, response.acks[0].error.message)
        return response

    async def came(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.requests) == count)


@pytest.fixture
async def queue() -> Held:
    return Held()


@pytest.fixture
async def client(queue: Held) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        yield client


async def submitted(client: penstock.Client, count: int, prefix: str = "p") -> list[str]:
    """Submit so many requests at once; return their ids."""
    return await asyncio.gather(*(client.submit(prompt=f"{prefix} {number}") for number in range(count)))


def the_line(client: penstock.Client) -> submit_line._Line:
    """Return the stream of a client that has one."""
    (line,) = client._lines._lines.values()
    return line


def prompts(queue: FakeQueue) -> dict[str, str]:
    return {request.request_id: request.text for request in queue.requests}


async def test_all_submits_of_a_client_go_over_one_stream(client: penstock.Client, queue: Held) -> None:
    names = [await client.submit(prompt=f"p {number}") for number in range(5)]
    assert [prompts(queue)[name] for name in names] == [f"p {number}" for number in range(5)]
    assert (len(queue.submit_streams), queue.unary_submits, queue.frames) == (1, 0, [1] * 5)


async def test_what_is_submitted_at_once_shares_frames_and_each_gets_its_own_ack(
    client: penstock.Client, queue: Held
) -> None:
    names = await submitted(client, 300)
    assert [prompts(queue)[name] for name in names] == [f"p {number}" for number in range(300)]
    assert len(queue.frames) < 10
    assert (len(queue.submit_streams), queue.unary_submits) == (1, 0)


async def test_a_frame_is_bounded(client: penstock.Client, queue: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_line, "MAX_FRAME_MESSAGES", 10)
    await submitted(client, 35)
    assert max(queue.frames) <= 10
    monkeypatch.setattr(submit_line, "TARGET_FRAME_BYTES", 1000)
    queue.frames.clear()
    await submitted(client, 8, "x" * 400)
    assert max(queue.frames) <= 2
    assert (sum(queue.frames), queue.unary_submits) == (8, 0)


async def test_a_broken_stream_loses_and_repeats_nothing_and_the_next_submit_opens_another(
    client: penstock.Client, queue: Held
) -> None:
    queue.break_submit_after_acks = 20
    names = await submitted(client, 100)
    assert len(queue.requests) == 100
    assert [prompts(queue)[name] for name in names] == [f"p {number}" for number in range(100)]
    asked = queue.unary_submits
    await submitted(client, 2, "q")
    assert (len(queue.submit_streams), queue.unary_submits) == (2, asked)


async def test_a_queue_that_is_away_is_waited_for(queue: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with serving(queue, address):
        client = penstock.Client(address, retry_for_s=20)
        await client.submit(prompt="before")
    paused: set[asyncio.Task[Any] | None] = set()
    pause = client._queue.pause

    async def noted(pause_s: float) -> None:
        paused.add(asyncio.current_task())
        await pause(pause_s)

    monkeypatch.setattr(client._queue, "pause", noted)
    waiting = asyncio.create_task(submitted(client, 10))

    async def asked_in_vain() -> bool:
        return waiting.done() or len(paused) == 10

    await wait_for_async(asked_in_vain, "each submit to be asked in vain")
    assert not waiting.done()
    async with serving(queue, address):
        names = await waiting
        assert len({*names}) == 10
        await client.submit(prompt="after")
        assert len(queue.submit_streams) > 1
        await client.close()


async def test_a_queue_that_stays_away_is_told_to_all() -> None:
    async with penstock.Client("127.0.0.1:1", retry_for_s=0.1) as client:
        for answer in await asyncio.gather(*(client.submit(prompt="p") for _ in range(3)), return_exceptions=True):
            assert isinstance(answer, penstock.Unavailable)


async def test_a_store_that_cannot_write_is_waited_for(client: penstock.Client, queue: Held) -> None:
    queue.store_failures = 5
    await client.submit(prompt="p")
    assert len(queue.requests) == 1


async def test_a_key_that_changes_while_an_ack_is_awaited_is_asked_for_again(
    client: penstock.Client, queue: Held
) -> None:
    """It may be as good as before, for other channels: what it may do now the queue says to a new call."""
    queue.revocations = 1
    assert len({*await submitted(client, 10)}) == len(queue.requests) == 10


async def test_a_full_disk_is_told_at_once(client: penstock.Client, queue: Held) -> None:
    queue.refuse_submits = 2
    async with asyncio.timeout(30):
        with pytest.raises(penstock.Unavailable, match="the disk is nearly full"):
            await client.submit(prompt="p")
    assert not queue.refuse_submits
    await client.submit(prompt="p")
    assert len(queue.submit_streams) == 1


async def test_one_request_that_is_refused_concerns_nobody_else(client: penstock.Client, queue: Held) -> None:
    good = [asyncio.create_task(client.submit(prompt=text)) for text in ("a", "b")]
    with pytest.raises(penstock.InvalidRequest) as refused:
        await client.submit(prompt="p", channel="nowhere")
    assert (str(refused.value), refused.value.param) == ("channel: is wrong", "channel")
    assert [prompts(queue)[name] for name in await asyncio.gather(*good)] == ["a", "b"]
    assert (len(queue.submit_streams), queue.unary_submits, queue.frames) == (1, 0, [3])


async def test_a_quota_is_told_by_its_name(client: penstock.Client, queue: Held) -> None:
    queue.over_quota = 1
    with pytest.raises(penstock.QuotaExceeded, match=r"^max_waiting_requests is 1$"):
        await client.submit(prompt="p")
    assert queue.unary_submits == 0


async def test_a_request_beyond_grpcs_limit_fails_alone(client: penstock.Client, queue: Held) -> None:
    queue.acks.clear()
    waiting = asyncio.create_task(client.submit(prompt="small"))
    await queue.came(1)
    with pytest.raises(penstock.InvalidRequest, match="bytes encoded") as refused:
        await client.submit(prompt="x" * (MAX_MESSAGE_BYTES + 1))
    assert refused.value.param == "request"
    queue.acks.set()
    await waiting
    await client.submit(prompt="another")
    assert len(queue.submit_streams) == 1


async def test_a_large_request_holds_up_nobody(client: penstock.Client, queue: Held) -> None:
    large = "x" * (TARGET_FRAME_BYTES + 1)
    name, other = await asyncio.gather(client.submit(prompt=large), client.submit(prompt="small"))
    assert (prompts(queue)[name], prompts(queue)[other]) == (large, "small")
    assert queue.unary_submits == 1


async def test_a_caller_that_goes_away_harms_nobody(client: penstock.Client, queue: Held) -> None:
    queue.acks.clear()
    first = asyncio.create_task(client.submit(prompt="first"))
    await queue.came(1)
    second = asyncio.create_task(client.submit(prompt="second"))
    await asyncio.sleep(0)
    first.cancel()
    queue.acks.set()
    name = await second
    assert prompts(queue)[name] == "second"
    await client.submit(prompt="third")
    assert (len(queue.submit_streams), queue.unary_submits) == (1, 0)


async def test_an_ack_that_comes_as_its_caller_goes_away_is_nobodys(client: penstock.Client) -> None:
    line = submit_line._Line(client._stub, "me")
    first, second = (asyncio.create_task(line.ask(request_pb2.Request(text="p"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    for tag in (0, 1):
        line._tell(tag, pb.SubmitAck(tag=tag))
    ack = await second
    assert ack is not None
    assert ack.tag == 1


async def test_what_is_not_sent_when_its_caller_goes_away_stays_unsent(client: penstock.Client, queue: Held) -> None:
    queue.acks.clear()
    first = asyncio.create_task(client.submit(prompt="first"))
    await queue.came(1)
    # More than gRPC takes for a queue that does not read.
    large = [asyncio.create_task(client.submit(prompt=f"{number} {'x' * 900_000}")) for number in range(40)]
    line = the_line(client)

    async def all_have_asked() -> bool:
        return len(line._waiting) == 41

    await wait_for_async(all_have_asked, "all to be in line")
    # Not the last, which is acked only after whatever is sent before it.
    *_, goes, last = large
    assert [request.text.split()[0] for request in line._unsent.values()][-2:] == ["38", "39"]
    goes.cancel()
    await asyncio.wait([goes])
    queue.acks.set()
    await asyncio.gather(first, *large[:-2], last)
    assert len(queue.requests) == 40


async def test_an_idle_stream_is_closed_and_the_next_submit_opens_another(
    client: penstock.Client, queue: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_line, "IDLE_S", 0.01)
    queue.acks.clear()
    waiting = asyncio.create_task(client.submit(prompt="slow"))
    await queue.came(1)
    line = the_line(client)

    async def over() -> bool:
        return line.over

    await wait_for_async(over, "the stream to have been idle for long enough")
    queue.acks.set()
    assert (await waiting, queue.unary_submits) == ("r-0", 0), "one that waits still gets its ack"

    async def idle() -> bool:
        return not client._lines._tasks

    await wait_for_async(idle, "the stream to be closed")
    assert not client._lines._lines
    await client.submit(prompt="later")
    assert (len(queue.submit_streams), queue.unary_submits) == (2, 0)


async def test_who_still_waits_when_the_client_closes_is_told(queue: Held) -> None:
    queue.acks.clear()
    async with serving(queue) as address:
        client = penstock.Client(address)
        waiting = asyncio.create_task(client.submit(prompt="p"))
        await queue.came(1)
        await client.close()
        with pytest.raises(penstock.Unavailable, match="closed"):
            await waiting
        queue.acks.set()


ENDINGS = {
    "closed": """
for _ in range(20):
    with penstock.SyncClient(sys.argv[1]) as client:
        client.submit(prompt="a")
""",
    "the loop ends": """
async def main():
    client = penstock.Client(sys.argv[1])
    await client.submit(prompt="a")
asyncio.run(main())
""",
    "the loop ends while one waits": """
async def main():
    client = penstock.Client(sys.argv[1])
    await client.submit(prompt="a")
    asyncio.create_task(client.submit(prompt="b"))
    await asyncio.sleep(0)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_program_ends_without_a_word(queue: Held, ending: str) -> None:
    program = f"import asyncio, sys, penstock\n{ENDINGS[ending]}\nprint('done')"
    async with serving(queue) as address:
        command = [sys.executable, "-W", "default", "-c", program, address]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("first", "last", "undone"),
    [
        ("disk_full", ((ANSWERED, "1"), (ERROR_CODE, "disk_full")), True),
        # After a write that failed nobody knows what the disk holds.
        ("store_unavailable", ((ANSWERED, "1"), (ERROR_CODE, "disk_full")), False),
        # What a proxy says in the queue's place tells nothing of the queue.
        ("disk_full", (), False),
    ],
)
async def test_a_refusal_tells_whether_nothing_is_stored(first: str, last: Any, undone: bool) -> None:
    class Refusing(Held):
        async def SubmitUnary(self, request: pb.SubmitUnaryRequest, context: Any) -> pb.SubmitUnaryResponse:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", last)
            raise AssertionError

    queue = Refusing()
    queue.refuse_submits, queue.store_failures = first == "disk_full", first == "store_unavailable"
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        with pytest.raises(penstock.Unavailable, match="no room") as refused:
            await client.submit(prompt="p")
    assert refused.value.is_undone == undone
