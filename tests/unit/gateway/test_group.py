"""Several prompts in one body: one answer, one name, one end, though the queue has a request for each."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from penstock import connection
from penstock.openai.bodies import COMPLETIONS_URL, MAX_PROMPTS, BodyError, parse_body
from penstock.openai.convert import to_request
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.group import Group
from services.gateway.requests import joined_status
from tests.support.asgi import get, post
from tests.support.fake_queue import completed, serving
from tests.support.resident import resident_bytes
from tests.unit.gateway.test_generation import CancellableQueue, Gateway, gateway, gateway_of, until

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
    await gateway.admission.settle()
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
    await gateway.admission.settle()
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
    await gateway.admission.settle()
    assert not gateway.queue.cancelled_batches
    await gateway.queue.finish_all()
    kept = await get(gateway.app, f"/v1/requests/{name}").whole()
    assert [choice["text"] for choice in kept.json()["response"]["body"]["choices"]] == [p.upper() for p in PROMPTS]


async def test_who_was_told_nothing_before_the_new_start_is_not_to_ask_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both_at_once(ids: Sequence[str], tokens: bool) -> AsyncGenerator[list[queue_pb2.WatchEvent], None]:
        deltas = [pb.TokenDelta(request_id=ids[0], attempt=attempt, token_ids=[attempt]) for attempt in (1, 2)]
        yield [queue_pb2.WatchEvent(tokens=delta) for delta in deltas]

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
    await gateway.admission.settle()
    assert gateway.queue.cancelled_batches == [deleted.batch]


@pytest.mark.parametrize("long", ["x" * 2**22, [1] * 2**20])
def test_a_long_first_prompt_takes_memory_once(long: Any) -> None:
    prompts = [long, *(["a"] * 99 if isinstance(long, str) else [[2]] * 99)]
    whole = to_request(parse_body(COMPLETIONS_URL, {**BODY, "prompt": prompts}, streams=True))
    before_bytes = resident_bytes()
    requests = Group.of("", len(prompts)).requests(whole, prompts)
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
