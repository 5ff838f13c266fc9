"""The client against a queue in memory: acks, results, reconnects, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import penstock
from penstock import submitting
from penstock.connection import Connection
from penstock.errors import given_name
from penstock.fields import RequestFields
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from tests.support.fake_queue import FakeQueue, cancelled, completed, saying, serving


@pytest.fixture
async def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
async def client(queue: FakeQueue) -> AsyncIterator[penstock.Client]:
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        yield client


async def test_a_submit_is_answered_with_an_id_and_a_result(client: penstock.Client, queue: FakeQueue) -> None:
    request_id = await client.submit(prompt="the river", max_tokens=5, temperature=0.0, stop="x", channel="batch")
    result = await client.result(request_id)
    assert (result.text, result.outcome, result.completed) == ("THE RIVER", penstock.Outcome.COMPLETED, True)
    assert result.usage == penstock.Usage(prompt_tokens=2, completion_tokens=2)
    stored = queue.requests[0]
    assert (stored.text, stored.channel, stored.sampling.max_tokens) == ("the river", "batch", 5)
    assert list(stored.sampling.stop) == ["x"]
    assert stored.sampling.HasField("temperature")
    assert not stored.sampling.HasField("top_p")


async def test_a_retried_submit_is_one_request(client: penstock.Client, queue: FakeQueue) -> None:
    queue.unavailable_calls = 3
    request_id = await client.submit(prompt="once")
    assert [r.request_id for r in queue.requests] == [request_id]


async def test_generate_submits_and_waits(client: penstock.Client) -> None:
    result = await client.generate(messages=[{"role": "user", "content": "hi"}])
    assert '"CONTENT": "HI"' in result.text


async def test_many_requests_share_frames_and_each_gets_one_ack(client: penstock.Client, queue: FakeQueue) -> None:
    acks = [ack async for ack in client.submit_many({"prompt": f"p {i}"} for i in range(3000))]
    assert sorted(ack.index for ack in acks) == list(range(3000))
    assert len({ack.request_id for ack in acks}) == 3000
    assert len(queue.frames) < 200


async def test_a_message_can_be_submitted_again_and_is_another_request(
    client: penstock.Client, queue: FakeQueue
) -> None:
    template = request_pb2.Request(text="p")
    with TracerProvider().get_tracer("test").start_as_current_span("caller"):
        names = [await client.submit_request(template) for _ in range(2)]
        names += [ack.request_id async for ack in client.submit_many([template, template])]
    assert names == [request.request_id for request in queue.requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert template == request_pb2.Request(text="p"), "the caller's message is as it was"


@pytest.mark.parametrize("key", ["", "k{}"])
async def test_a_broken_submit_loses_and_repeats_nothing(client: penstock.Client, queue: FakeQueue, key: str) -> None:
    queue.break_submit_after_acks = 700
    fields: Any = ({"prompt": f"p {i}", "idempotency_key": key.format(i)} for i in range(2000))
    acks = [ack async for ack in client.submit_many(fields)]
    assert sorted(ack.index for ack in acks) == list(range(2000))
    assert len(queue.requests) == 2000
    assert sum(queue.frames) > 2000, "what was stored without an ack was sent again"
    assert any(ack.duplicate for ack in acks) is bool(key), "a key of the client's own is nobody else's"


async def test_a_full_queue_is_tried_again(client: penstock.Client, queue: FakeQueue) -> None:
    queue.refuse_submits = 2
    acks = [ack async for ack in client.submit_many({"prompt": f"p {i}"} for i in range(5))]
    assert sorted(ack.index for ack in acks) == list(range(5))


async def test_what_a_quota_does_not_let_in_is_told_or_waited_for(
    client: penstock.Client, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "QUOTA_PAUSE_S", 0.01)
    wanted: list[penstock.RequestFields] = [{"prompt": f"p {i}"} for i in range(5)]
    queue.over_quota = 2
    acks = [ack async for ack in client.submit_many(wanted)]
    assert [ack.error.code if ack.error else "" for ack in acks] == ["insufficient_quota"] * 2 + [""] * 3
    queue.over_quota = 100
    acks = [ack async for ack in client.submit_many(wanted, wait_for_quota=True)]
    assert sorted(ack.index for ack in acks) == list(range(5))
    assert not any(ack.error for ack in acks)


class Crowded(FakeQueue):
    """Reads 40 frames before it answers any, refuses all of them, and has room from then on."""

    async def Submit(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = [frame async for _, frame in _counted(request_iterator, 41)]
        for frame in first[1:]:
            tags = [tagged.tag for tagged in frame.batch.requests]
            refusals = [queue_pb2.SubmitAck(tag=tag, status=queue_pb2.SUBMIT_STATUS_UNAVAILABLE) for tag in tags]
            yield queue_pb2.SubmitResponse(acks=queue_pb2.SubmitAcks(acks=refusals))
        async for response in super().Submit(request_iterator, context):
            yield response


async def _counted(items: AsyncIterator[Any], count: int) -> AsyncIterator[tuple[int, Any]]:
    for number in range(count):
        yield number, await anext(items)


async def test_many_refused_frames_are_tried_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.submitting.MAX_FRAME_MESSAGES", 20)
    # A pause for each of the forty refusals would take a minute.
    async with serving(Crowded()) as address, penstock.Client(address, retry_for_s=5) as client:
        acks = [ack async for ack in client.submit_many({"prompt": f"p {i}"} for i in range(800))]
    assert sorted(ack.index for ack in acks) == list(range(800))


async def test_what_comes_after_a_broken_stream_is_sent_on_the_new_one(
    client: penstock.Client, queue: FakeQueue
) -> None:
    queue.break_submit_after_acks = 50
    acked = 0
    all_of_the_first = asyncio.Event()

    async def source() -> AsyncIterator[RequestFields]:
        for number in range(100):
            yield {"prompt": f"p {number}"}
        # The stream breaks and is opened again while its writer has nothing to send.
        await all_of_the_first.wait()
        for number in range(100, 200):
            yield {"prompt": f"p {number}"}

    async with asyncio.timeout(30):
        async for _ in client.submit_many(source()):
            acked += 1
            if acked == 100:
                all_of_the_first.set()
    assert (acked, len(queue.requests)) == (200, 200)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        # What grpc.aio raises when a stream ends while it is being written.
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
        # What a server that stops does to calls that are open when its grace is over.
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
    ],
)
async def test_a_call_that_is_torn_off_is_made_again(code: grpc.StatusCode, details: str) -> None:
    connection = Connection("127.0.0.1:1", retry_for_s=5)
    torn = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    answers: list[Exception | str] = [torn, "there"]

    async def method() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await connection.call(method) == "there"
    await connection.wait_or_raise(connection.patience(), torn)
    await connection.close()


async def test_a_turn_is_had_for_an_attempt_and_not_while_the_next_is_waited_for() -> None:
    connection, turn, seen = Connection("127.0.0.1:1", retry_for_s=5), asyncio.Lock(), list[bool]()

    async def method() -> None:
        seen.append(turn.locked())
        if len(seen) == 1:
            asyncio.get_running_loop().call_soon(lambda: seen.append(turn.locked()))
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away")

    await connection.call(method, lambda: turn)
    assert seen == [True, False, True]
    await connection.close()


async def test_a_queue_that_stays_full_is_reported(queue: FakeQueue) -> None:
    queue.refuse_submits = 10**6
    async with serving(queue) as address, penstock.Client(address, retry_for_s=0.2) as client:
        with pytest.raises(penstock.Unavailable, match="nearly full"):
            async for _ in client.submit_many([{"prompt": "p"}]):
                pass
        with pytest.raises(penstock.Unavailable, match="nearly full"):
            await client.submit(prompt="p")


async def test_a_refused_request_has_its_error_in_the_ack(client: penstock.Client) -> None:
    acks = [a async for a in client.submit_many([{"prompt": "a"}, {"prompt": "b", "channel": "nowhere"}])]
    assert acks[0].error is None
    assert acks[1].error is not None
    assert acks[1].error.param == "channel"


async def test_the_source_of_many_requests_may_fail(client: penstock.Client, queue: FakeQueue) -> None:
    async def source() -> AsyncIterator[penstock.RequestFields]:
        yield {"prompt": "a"}
        raise LookupError("the file is gone")

    acks = client.submit_many(source())
    assert (await anext(acks)).index == 0, "what was given before is acked"
    with pytest.raises(LookupError):
        await anext(acks)


async def test_a_submit_names_the_wrong_field(client: penstock.Client) -> None:
    with pytest.raises(penstock.InvalidRequest) as refused:
        await client.submit(prompt="p", channel="nowhere")
    assert refused.value.param == "channel"
    with pytest.raises(penstock.InvalidRequest) as unknown:
        await client.submit(prompt="p", shiny=1)  # type: ignore[call-arg]
    assert unknown.value.param == "shiny"


@pytest.mark.parametrize(("name", "value"), [("channel", "nowhere"), ("max_tokens", 0), ("deadline_unix_ns", 1)])
async def test_a_refused_field_has_the_name_the_caller_gave(client: penstock.Client, name: str, value: object) -> None:
    fields = cast(penstock.RequestFields, {"prompt": "x", name: value})
    with pytest.raises(penstock.InvalidRequest) as refused:
        await client.submit(**fields)
    assert (refused.value.param, str(refused.value)) == (name, f"{name}: is wrong")
    acks = [ack async for ack in client.submit_many([fields])]
    assert acks[0].error is not None
    assert (acks[0].error.param, acks[0].error.message) == (name, f"{name}: is wrong")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("requests[12].sampling.logit_bias[5]", "logit_bias[5]"),
        ("requests[0].chat.messages_json", "messages"),
        ("sampling.extra_args_json", "extra_args"),
        ("requests[0].token_ids.ids", "prompt"),
        ("idempotency_key", "idempotency_key"),
        ("", ""),
    ],
)
def test_paths_on_the_wire_become_names_of_fields(path: str, name: str) -> None:
    assert given_name(path) == name


async def test_a_watch_goes_on_after_its_cursor_over_reconnects(client: penstock.Client, queue: FakeQueue) -> None:
    [_ async for _ in client.submit_many({"prompt": f"p {i}", "batch": "b"} for i in range(50))]
    queue.break_watch_after_results = 20
    results = [result async for result in client.watch("b")]
    assert [result.request_id for result in results] == [f"r-{i}" for i in range(50)]
    assert [watch.cursor for watch in queue.watches] == [0, 20]
    later = [result async for result in client.watch("b", cursor=results[39].cursor)]
    assert [result.request_id for result in later] == [f"r-{i}" for i in range(40, 50)]


async def test_a_watch_of_ids_asks_only_for_what_is_open(client: penstock.Client, queue: FakeQueue) -> None:
    ids = [await client.submit(prompt=f"p {i}") for i in range(4)]
    queue.break_watch_after_results = 3
    results = [result async for result in client.watch(request_ids=ids)]
    assert [result.request_id for result in results] == ids
    assert list(queue.watches[-1].request_ids.ids) == ids[3:]


async def test_a_watch_that_ends_without_a_result_says_whose(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(_request: Any, _context: Any) -> AsyncIterator[queue_pb2.WatchResponse]:
        result = queue_pb2.WatchResult(cursor=1, result=queue.results[0])
        yield queue_pb2.WatchResponse(events=[queue_pb2.WatchEvent(result=result)])

    monkeypatch.setattr(queue, "Watch", watch)
    async with serving(queue) as address, penstock.Client(address) as client:
        ids = [await client.submit(prompt=text) for text in "ab"]
        events = client.events(request_ids=ids)
        await anext(events)
        with pytest.raises(penstock.NotFound, match=f"{ids[1]}.* has no result"):
            await anext(events)


async def test_tokens_come_once_and_in_order(client: penstock.Client, queue: FakeQueue) -> None:
    def delta(attempt: int, offset: int, text: str) -> request_pb2.TokenDelta:
        return request_pb2.TokenDelta(request_id="r-0", attempt=attempt, offset=offset, token_ids=[1], text=text)

    queue.answer = cancelled
    queue.tokens = [delta(1, 0, "a"), delta(1, 1, "b"), delta(1, 1, "b"), delta(2, 0, "A"), delta(1, 2, "c")]
    request_id = await client.submit(prompt="p")
    deltas = [token async for token in client.tokens(request_id)]
    assert [(d.attempt, d.text) for d in deltas] == [(1, "a"), (1, "b"), (2, "A")]


async def test_a_delta_from_the_start_is_cut_to_what_is_new(client: penstock.Client, queue: FakeQueue) -> None:
    """After a reconnect the queue sends a running request's output from its start."""

    def delta(offset: int, tokens: int, text: str) -> request_pb2.TokenDelta:
        ids = range(offset, offset + tokens)
        return request_pb2.TokenDelta(request_id="r-0", attempt=1, offset=offset, token_ids=ids, text=text)

    queue.answer = cancelled
    queue.tokens = [delta(0, 2, "ab"), delta(0, 3, "abc"), delta(3, 1, "d"), delta(6, 1, "g"), delta(4, 1, "e")]
    request_id = await client.submit(prompt="p")
    deltas = [token async for token in client.tokens(request_id)]
    assert "".join(d.text for d in deltas) == "abcde"
    assert [token for d in deltas for token in d.token_ids] == [0, 1, 2, 3, 4]


def told(attempt: int, offset: int, text: str) -> request_pb2.TokenDelta:
    """A delta of the first request of a queue, a token a character."""
    ids = range(offset, offset + len(text))
    return request_pb2.TokenDelta(request_id="r-0", attempt=attempt, offset=offset, token_ids=ids, text=text)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([told(1, 0, "ab")], [(1, 0, "ab"), (1, 2, "cd")]),
        ([told(1, 0, "abcd")], [(1, 0, "abcd")]),
        ([], [(1, 0, "abcd")]),
        ([told(1, 0, "xy")], [(1, 0, "xy"), (2, 0, "abcd")]),
        ([told(1, 0, "xy"), told(2, 0, "a")], [(1, 0, "xy"), (2, 0, "a"), (2, 1, "bcd")]),
        ([told(1, 0, "abcde")], [(1, 0, "abcde"), (2, 0, "abcd")]),
        ([request_pb2.TokenDelta(request_id="r-0", attempt=1, token_ids=[7])], [(1, 0, ""), (2, 0, "abcd")]),
    ],
    ids=["part", "all", "nothing", "something else", "a later attempt", "more", "another token without text"],
)
async def test_tokens_that_were_not_sent_come_with_the_result(
    client: penstock.Client,
    queue: FakeQueue,
    deltas: list[request_pb2.TokenDelta],
    expected: list[tuple[int, int, str]],
) -> None:
    queue.tokens, queue.answer = deltas, saying("abcd")
    request_id = await client.submit(prompt="p")
    given = [token async for token in client.tokens(request_id)]
    assert [(token.attempt, token.offset, token.text) for token in given] == expected
    last = [token.token_ids for token in given if token.attempt == given[-1].attempt]
    assert [token_id for token_ids in last for token_id in token_ids] == [0, 1, 2, 3]


async def test_the_rest_of_each_completion_comes_with_its_own_tokens(client: penstock.Client, queue: FakeQueue) -> None:
    def two(_request: request_pb2.Request) -> request_pb2.Result:
        logprobs = [request_pb2.TokenLogprob(token_id=number) for number in range(2)]
        choices = [
            request_pb2.Choice(index=index, text="ab", token_ids=[0, 1], logprobs=logprobs) for index in range(2)
        ]
        return request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED, choices=choices, attempts=1)

    queue.tokens, queue.answer = [told(1, 0, "a")], two
    request_id = await client.submit(prompt="p")
    given = [token async for token in client.tokens(request_id)]
    assert [(token.index, token.text, token.token_ids) for token in given] == [
        (0, "a", (0,)), (0, "b", (1,)), (1, "ab", (0, 1)),
    ]  # fmt: skip
    assert [[entry.token_id for entry in token.logprobs] for token in given] == [[], [1], [0, 1]]


async def test_get_by_id_and_by_key(client: penstock.Client) -> None:
    request_id = await client.submit(prompt="p", idempotency_key="mine")
    by_id, by_key = await client.get(request_id), await client.get(idempotency_key="mine")
    assert by_id == by_key
    assert by_id.state is penstock.RequestState.DONE
    with pytest.raises(penstock.NotFound, match="nobody"):
        await client.get("nobody")
    with pytest.raises(penstock.NotFound):
        await client.result("nobody")


async def test_cancel_delete_and_dead_letters(client: penstock.Client, queue: FakeQueue) -> None:
    request_id = await client.submit(prompt="p")
    assert (await client.cancel(request_id, "other")).not_cancelled == ("other",)
    assert await client.delete(request_id) == 1
    queue.dead = [queue_pb2.DeadLetter(request_id=f"d-{i}", attempts=3, last_error="oom") for i in range(5)]
    assert [letter.request_id async for letter in client.dead_letters()] == [f"d-{i}" for i in range(5)]
    assert (await client.requeue(all_dead=True)).requeued == 5
    assert (await client.requeue("d-1", "x")).not_dead == ("x",)


async def test_nothing_listens() -> None:
    async with penstock.Client("127.0.0.1:1", retry_for_s=0.1) as client:
        with pytest.raises(penstock.Unavailable, match=r"127\.0\.0\.1:1"):
            await client.stats()
        with pytest.raises(penstock.Unavailable):
            async for _ in client.watch("b"):
                pass


async def test_a_request_joins_the_callers_trace(client: penstock.Client, queue: FakeQueue) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("caller") as span:
        await client.submit(prompt="p")
    wanted = trace.format_trace_id(span.get_span_context().trace_id)
    assert queue.requests[0].traceparent.split("-")[1] == wanted
    await client.submit(prompt="q")
    assert queue.requests[1].traceparent == ""


async def test_abandoning_a_stream_leaves_nothing_running(client: penstock.Client, queue: FakeQueue) -> None:
    stream = client.submit_many({"prompt": f"p {i}"} for i in range(100))
    async for _ in stream:
        break
    await stream.aclose()
    assert not [task for task in asyncio.all_tasks() if "SubmitSession" in repr(task)]


async def test_the_blocking_client_does_the_same(queue: FakeQueue) -> None:
    async with serving(queue) as address:

        def work() -> None:
            with penstock.SyncClient(address, retry_for_s=5) as client:
                assert client.generate(prompt="abc").text == "ABC"
                acks = list(client.submit_many({"prompt": f"p {i}", "batch": "s"} for i in range(10)))
                assert [ack.index for ack in acks] == list(range(10))
                assert len(list(client.watch("s"))) == 10
                for _ in client.watch("s"):
                    break
                assert client.stats().dead == 1
                with pytest.raises(penstock.NotFound):
                    client.get("nobody")
            client.close()

        await asyncio.to_thread(work)


async def test_results_carry_everything_the_wire_says() -> None:
    def answer(request: request_pb2.Request) -> request_pb2.Result:
        result = completed(request)
        result.choices[0].logprobs.add(token_id=3, token="x", logprob=-0.5, rank=1).top.add(token_id=4, token="y")
        result.choices[0].stop_token_id = 0
        result.timings.first_token_unix_ns = 7
        return result

    queue = FakeQueue(answer)
    async with serving(queue) as address, penstock.Client(address) as client:
        result = await client.generate(prompt="p", logprobs=1)
    choice = result.choices[0]
    assert choice.logprobs[0].top[0].token == "y"
    assert choice.stop_token_id == 0
    assert choice.finish_reason is penstock.FinishReason.LENGTH
    assert result.timings.first_token_unix_ns == 7
