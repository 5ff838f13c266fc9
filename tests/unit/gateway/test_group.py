"""Several prompts in one body: one answer, one name, one end, though the queue has a request for each."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import pytest

from penstock import connection
from penstock.following import Told
from penstock.openai.bodies import COMPLETIONS_URL, BodyError, parse_body
from penstock.openai.chunks import Chunks
from penstock.openai.convert import to_request
from penstock.openai.limits import MAX_PROMPTS
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.group import Gathered, Group, JoinedChunks
from services.gateway.limits import MAX_TOGETHER_BYTES, SUBMIT_WINDOW_BYTES
from services.gateway.requests import described, joined_status
from tests.support.asgi import get, post
from tests.support.fake_queue import completed, serving
from tests.support.resident import resident_bytes
from tests.unit.gateway.test_generation import PATIENCE_S, CancellableQueue, Gateway, gateway, gateway_of, until

__all__ = ["gateway"]

PROMPTS = ["the river", "a", "one two three"]
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS}


async def test_the_answer_has_all_choices_in_the_order_of_the_prompts(gateway: Gateway) -> None:
    answer = await post(gateway.app, COMPLETIONS_URL, BODY, x_penstock_channel="batch").whole()
    body = answer.json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "THE RIVER"), (1, "A"), (2, "ONE TWO THREE")]
    assert body["usage"]["total_tokens"] == 12
    assert body["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert {stored.channel for stored in gateway.queue.requests} == {"batch"}
    kept = await get(gateway.app, f"/v1/requests/{answer.headers['x-request-id']}").whole()
    assert kept.json()["response"] == {"status_code": 200, "body": body}
    assert kept.json()["status"] == "completed"


async def test_token_lists_and_an_idempotency_key(gateway: Gateway) -> None:
    body = {**BODY, "prompt": [[1, 2], [3]]}
    first, second = [await post(gateway.app, COMPLETIONS_URL, body, idempotency_key="k").whole() for _ in range(2)]
    assert first.json() == second.json()
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert [list(stored.token_ids.ids) for stored in gateway.queue.requests] == [[1, 2], [3]]


async def test_a_stream_numbers_the_choices_of_all_prompts(gateway: Gateway) -> None:
    gateway.queue.paused = True
    body = {**BODY, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    exchange = post(gateway.app, COMPLETIONS_URL, body)
    await until(lambda: len(gateway.queue.requests) == 3)

    def answer(request: pb.Request) -> pb.Result:
        result = completed(request)
        result.usage.cached_tokens = 1
        result.choices.add(index=1, text=f"{request.text}, too", finish_reason=pb.FINISH_REASON_STOP)
        return result

    gateway.queue.answer = answer
    gateway.queue.tokens = [
        pb.TokenDelta(request_id=request.request_id, attempt=1, index=0, token_ids=[0], text=request.text[:1].upper())
        for request in gateway.queue.requests
    ]
    await until(lambda: len(gateway.queue.followed) == 3)
    for request in reversed(gateway.queue.requests):
        await gateway.queue.finish(request)
    events = [json.loads(event) for event in (await exchange.whole()).events[:-1]]
    usage = events.pop()["usage"]
    assert usage["prompt_tokens"] == usage["completion_tokens"] == 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    texts: dict[int, str] = {}
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert [texts[index] for index in range(0, 6, 2)] == [prompt.upper() for prompt in PROMPTS]
    assert [texts[index] for index in range(1, 6, 2)] == [f"{prompt}, too" for prompt in PROMPTS]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize(
    ("header", "cancels"), [({}, 1), ({"x_penstock_keep": "true"}, 1), ({"idempotency_key": "k"}, 0)]
)
async def test_what_the_queue_refuses_of_some_is_refused_of_all(
    gateway: Gateway, header: dict[str, str], cancels: int
) -> None:
    refused = await post(gateway.app, COMPLETIONS_URL, BODY, x_penstock_channel="nowhere", **header).whole()
    assert (refused.status, refused.json()["error"]["param"]) == (400, "x-penstock-channel")
    await gateway.admission.settle(PATIENCE_S)
    assert len(gateway.queue.cancelled_batches) == cancels, "what nobody can ask for by its name or key"


async def test_one_refused_prompt_is_the_answer_and_the_others_are_cancelled(gateway: Gateway) -> None:
    error = pb.RequestError(code="context_length_exceeded", message="too long", param="prompt")

    def answer(request: pb.Request) -> pb.Result:
        return pb.Result(outcome=pb.OUTCOME_REJECTED, error=error) if request.text == "a" else completed(request)

    gateway.queue.answer = answer
    refused = await post(gateway.app, COMPLETIONS_URL, BODY).whole()
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    group = Group.named(refused.headers["x-request-id"])
    assert group is not None
    await until(lambda: group.batch in gateway.queue.cancelled_batches)
    kept = await get(gateway.app, f"/v1/requests/{group.name}").whole()
    assert kept.json()["status"] == "rejected"
    assert kept.json()["response"]["status_code"] == 400


@pytest.mark.parametrize("header", [{"x_penstock_keep": "true"}, {"idempotency_key": "k"}])
async def test_what_is_kept_goes_on_when_another_prompt_fails_and_is_there_when_that_is_requeued(
    gateway: Gateway, header: dict[str, str]
) -> None:
    gateway.queue.paused = True
    exchange = post(gateway.app, COMPLETIONS_URL, BODY, **header)
    await until(lambda: len(gateway.queue.followed) == 3)
    dead = pb.Result(outcome=pb.OUTCOME_DEAD, error=pb.RequestError(code="attempts_exhausted", message="it broke"))
    gateway.queue.answer = lambda _: dead
    await gateway.queue.finish(gateway.queue.requests[1])
    failed = await exchange.whole()
    assert (failed.status, failed.error["code"]) == (500, "attempts_exhausted")
    await gateway.admission.settle(PATIENCE_S)
    assert not gateway.queue.cancelled_batches
    gateway.queue.results.clear()  # as a requeue does
    gateway.queue.answer = completed
    await gateway.queue.finish_all()
    answer = (await get(gateway.app, f"/v1/requests/{failed.headers['x-request-id']}").whole()).json()["response"]
    assert [choice["text"] for choice in answer["body"]["choices"]] == [prompt.upper() for prompt in PROMPTS]


@pytest.mark.parametrize("keep", ["false", "true"])
async def test_a_client_that_leaves_takes_all_of_them_along(gateway: Gateway, keep: str) -> None:
    gateway.queue.paused = True
    exchange = post(gateway.app, COMPLETIONS_URL, BODY, x_penstock_keep=keep)
    await until(lambda: len(gateway.queue.followed) == 3)
    group = gateway.queue.requests[0].batch
    state = (await get(gateway.app, f"/v1/requests/{group}-3").whole()).json()
    assert (state["status"], state["response"]) == ("waiting", None)
    exchange.leave()
    await exchange.whole()
    await gateway.admission.settle(PATIENCE_S)
    assert gateway.queue.cancelled_batches == ([group] if keep == "false" else [])


async def test_deleting_the_whole_is_deleting_all(gateway: Gateway) -> None:
    answer = await post(gateway.app, COMPLETIONS_URL, BODY).whole()
    name = answer.headers["x-request-id"]
    deleted = await get(gateway.app, f"/v1/requests/{name}", method="DELETE").whole()
    assert deleted.json() == {"id": name, "object": "request.deleted", "deleted": True}
    assert gateway.queue.deleted == ["r-0", "r-1", "r-2"]
    unknown = Group.of("", 2).name
    refused = await get(gateway.app, f"/v1/requests/{unknown}").whole()
    assert (refused.status, refused.json()["error"]["message"]) == (404, f"request_id: {unknown!r} is unknown")


@pytest.mark.parametrize("stream", [False, True])
async def test_more_bodies_than_a_client_may_watch_are_answered(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(connection, "MAX_WATCHES", 1)
    queue = CancellableQueue()
    queue.paused = True
    async with serving(queue) as address, gateway_of(address, queue) as gateway:
        exchanges = [post(gateway.app, COMPLETIONS_URL, {**BODY, "stream": stream}) for _ in range(3)]
        await until(lambda: all(exchange.task.done() for exchange in exchanges[1:]) or len(queue.followed) == 9)
        await queue.finish_all()
        assert [(await exchange.whole()).status for exchange in exchanges] == [200] * 3
        assert len(queue.follows) == 1, "all that are waited for share a stream"


async def test_an_answer_that_was_started_again_is_where_the_error_says(gateway: Gateway) -> None:
    gateway.queue.paused = True
    gateway.queue.tokens = [
        pb.TokenDelta(request_id="r-0", attempt=1, token_ids=[1], text="Once"),
        pb.TokenDelta(request_id="r-0", attempt=2, token_ids=[9], text="Twice"),
    ]
    answer = await post(gateway.app, COMPLETIONS_URL, {**BODY, "stream": True}).whole()
    error = json.loads(answer.events[-2])["error"]
    name = answer.headers["x-request-id"]
    assert (error["code"], f"GET /v1/requests/{name} has the answer" in error["message"]) == ("answer_restarted", True)
    await gateway.admission.settle(PATIENCE_S)
    assert not gateway.queue.cancelled_batches
    await gateway.queue.finish_all()
    kept = await get(gateway.app, f"/v1/requests/{name}").whole()
    assert [choice["text"] for choice in kept.json()["response"]["body"]["choices"]] == [p.upper() for p in PROMPTS]


async def test_who_was_told_nothing_before_the_new_start_is_not_to_ask_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both_at_once(ids: Sequence[str], tokens: bool, large_bytes: int) -> AsyncGenerator[Told, None]:
        deltas = [pb.TokenDelta(request_id=ids[0], attempt=attempt, token_ids=[attempt]) for attempt in (1, 2)]
        yield Told([queue_pb2.WatchEvent(tokens=delta) for delta in deltas])

    monkeypatch.setattr(gateway.parts.client, "wire_events_of", both_at_once)
    for headers in ({}, {"idempotency_key": "k"}):
        refused = await post(gateway.app, COMPLETIONS_URL, {**BODY, "stream": True}, **headers).whole()
        assert (refused.status, refused.error["code"]) == (500, "answer_restarted")
        assert refused.headers.get("x-should-retry") == (None if headers else "false")


async def test_when_one_is_deleted_meanwhile_the_others_are_cancelled(gateway: Gateway) -> None:
    gateway.queue.paused = True
    exchange = post(gateway.app, COMPLETIONS_URL, BODY)
    await until(lambda: len(gateway.queue.followed) == 3)
    async with gateway.queue.changed:
        deleted = gateway.queue.requests.pop(1)
        gateway.queue.changed.notify_all()
    answer = await exchange.whole()
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    await gateway.admission.settle(PATIENCE_S)
    assert gateway.queue.cancelled_batches == [deleted.batch]


async def test_requests_are_made_as_the_queue_takes_them(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    requests = Group.requests

    def counted(*given: Any) -> Iterator[pb.Request]:
        nonlocal made
        for request in requests(*given):
            made += 1
            yield request

    monkeypatch.setattr(Group, "requests", counted)
    gateway.queue.acks.clear()
    exchange = post(gateway.app, COMPLETIONS_URL, {**BODY, "prompt": ["a"] * 100, **shared(200_000)})
    await until(lambda: bool(gateway.queue.requests))
    assert made == SUBMIT_WINDOW_BYTES // 200_000 + 2, "those on their way, and the next"
    gateway.queue.acks.set()
    assert (await exchange.whole()).status == 200
    assert made == 100


async def test_prompts_that_come_to_too_much_together_are_refused(gateway: Gateway) -> None:
    body = {**BODY, "prompt": ["a"] * MAX_PROMPTS, **shared(70_000)}
    refused = await post(gateway.app, COMPLETIONS_URL, body).whole()
    assert (refused.status, refused.error["code"], refused.error["param"]) == (413, "request_too_large", "prompt")
    assert f"at most {MAX_TOGETHER_BYTES}" in refused.error["message"]
    assert not gateway.queue.requests


async def test_as_many_prompts_as_there_may_be_share_a_schema(gateway: Gateway) -> None:
    body = {**BODY, "prompt": ["x" * 8_000] * MAX_PROMPTS, **shared(2_000)}
    assert (await post(gateway.app, COMPLETIONS_URL, body).whole()).status == 200
    assert len(gateway.queue.requests) == MAX_PROMPTS


def shared(size_bytes: int) -> dict[str, Any]:
    """Return a field of this size, of all prompts of a body."""
    return {"structured_outputs": {"grammar": "root ::= " + "x" * size_bytes}}


def test_the_sizes_are_those_of_the_requests() -> None:
    prompts = ["a", "x" * 200, "é", "the river"]
    whole = to_request(parse_body(COMPLETIONS_URL, {**BODY, "prompt": prompts, **shared(1000)}, streams=True))
    whole.idempotency_key = "k"
    group = Group.of("k", len(prompts))
    sizes_bytes = [request.ByteSize() for request in group.requests(whole, prompts)]
    assert list(group.sizes_bytes(whole, prompts)) == sizes_bytes


async def test_answers_that_are_too_large_together_are_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.group.MAX_ANSWERS_BYTES", 3_000)
    body = {**BODY, "prompt": ["a", "x" * 2_000, "y" * 2_000, "b"]}
    refused = await post(gateway.app, COMPLETIONS_URL, body).whole()
    assert (refused.status, refused.error["code"]) == (400, "result_too_large")
    assert refused.headers["x-should-retry"] == "false"
    name = refused.headers["x-request-id"]
    group = Group.named(name)
    assert group is not None
    await until(lambda: gateway.queue.cancelled_batches == [group.batch])
    kept = await get(gateway.app, f"/v1/requests/{name}").whole()
    assert (kept.status, kept.error["code"]) == (400, "result_too_large")
    deleted = await get(gateway.app, f"/v1/requests/{name}", method="DELETE").whole()
    assert deleted.json()["deleted"]
    streamed = await post(gateway.app, COMPLETIONS_URL, {**body, "stream": True}).whole()
    assert (streamed.status, len(streamed.events)) == (200, 5)
    alone = await post(gateway.app, COMPLETIONS_URL, {**body, "prompt": "x" * 4_000}).whole()
    assert alone.status == 200


def test_what_is_gathered_does_not_hold_on_to_the_frames_it_came_in() -> None:
    ids = [f"r-{number}" for number in range(50)]
    gathered = Gathered(ids)
    others = queue_pb2.WatchEvent(tokens=pb.TokenDelta(text="x" * 2**22))
    before_bytes = resident_bytes()
    for name in ids:
        choice = pb.Choice(text=name)
        result = queue_pb2.WatchResult(result=pb.Result(request_id=name, choices=[choice]))
        frame = queue_pb2.FollowResponse(events=[others, queue_pb2.WatchEvent(result=result)])
        read = queue_pb2.FollowResponse.FromString(frame.SerializeToString())
        gathered.add(read.events[1].result.result, 100)
    assert resident_bytes() - before_bytes < 50 * 2**20, "4 MiB for each of fifty are four times as much"
    assert gathered.whole
    assert [choice["text"] for choice in gathered.body("several", Shape())["choices"]] == ids


def test_a_stream_keeps_of_what_it_has_told_the_counts_alone() -> None:
    ids = [f"r-{number}" for number in range(50)]
    each = [Chunks(Shape(), "several", 1, "tiny", 1, False, first=number) for number in range(len(ids))]
    joined = JoinedChunks(each, ids, True)
    choice = pb.Choice(text="x", token_ids=[1], logprobs=[pb.TokenLogprob(token="x" * 2**22)])
    content = pb.Result(choices=[choice], usage=pb.Usage(prompt_tokens=1, completion_tokens=1)).SerializeToString()
    before_bytes = resident_bytes()
    for name in ids:
        result = pb.Result.FromString(content)
        result.request_id = name
        ending = joined.ending(name)
        *_, last = map("".join, ending(result))
        assert "".join(list(ending(result))[-1]) == last, "it may be told again"
    assert json.loads(last)["usage"]["total_tokens"] == 100
    assert resident_bytes() - before_bytes < 50 * 2**20, "4 MiB for each of fifty are four times as much"


@pytest.mark.parametrize("long", ["x" * 2**22, [1] * 2**20])
def test_a_long_first_prompt_takes_memory_once(long: Any) -> None:
    prompts = [long, *(["a"] * 99 if isinstance(long, str) else [[2]] * 99)]
    whole = to_request(parse_body(COMPLETIONS_URL, {**BODY, "prompt": prompts}, streams=True))
    before_bytes = resident_bytes()
    requests = list(Group.of("", len(prompts)).requests(whole, prompts))
    assert resident_bytes() - before_bytes < 100 * 2**20, "4 MiB for each of a hundred are four times as much"
    assert [request.ByteSize() < 200 for request in requests] == [False, *[True] * 99]


def test_names_and_keys() -> None:
    group = Group.of("a key", 7)
    assert group == Group.of("a key", 7) == Group.named(group.name)
    assert Group.of("", 7) != Group.of("", 7)
    assert group.key(0) != group.key(1)
    for name in ("r-1", "several-", f"{group.batch}-0", f"{group.name}x", f"batch_{group.name}"):
        assert Group.named(name) is None


@pytest.mark.parametrize(
    ("statuses", "whole"),
    [(["waiting", "waiting"], "waiting"), (["completed", "waiting"], "running"), (["rejected", "running"], "running"),
     (["completed", "dead", "rejected"], "dead"), (["completed", "completed"], "completed")],
)  # fmt: skip
def test_the_status_of_a_whole(statuses: list[str], whole: str) -> None:
    assert joined_status(statuses) == whole


def test_what_ended_first_without_an_answer_is_what_all_are_shown_as() -> None:
    """The others were cancelled by the gateway because of it."""
    results = [
        pb.Result(outcome=pb.OUTCOME_CANCELLED, timings=pb.Timings(completed_unix_ns=3)),
        pb.Result(outcome=pb.OUTCOME_COMPLETED, timings=pb.Timings(completed_unix_ns=1)),
        pb.Result(outcome=pb.OUTCOME_REJECTED, timings=pb.Timings(completed_unix_ns=2)),
    ]
    found = [queue_pb2.GetResponse(state=queue_pb2.REQUEST_STATE_DONE, result=result) for result in results]
    shown = described("several", found)
    assert (shown["status"], shown["response"]["status_code"]) == ("rejected", 400)


@pytest.mark.parametrize("prompt", [[], ["a", ""], [[1], []], ["a", [1]], ["a", 1], ["a"] * (MAX_PROMPTS + 1)])
def test_wrong_prompts_are_named(prompt: Any) -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(COMPLETIONS_URL, {"prompt": prompt}, streams=True)
    assert refused.value.param == "prompt"


def test_a_batch_line_has_one_prompt() -> None:
    with pytest.raises(BodyError) as refused:
        parse_body(COMPLETIONS_URL, {"prompt": ["a", "b"]})
    assert (refused.value.param, refused.value.code) == ("prompt", "unsupported_parameter")
    assert parse_body(COMPLETIONS_URL, {"prompt": ["a"]}).prompts == ["a"]
