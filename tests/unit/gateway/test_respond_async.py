"""`Prefer: respond-async`: the id at once, the answer by it; nobody holds a connection for as long as it waits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from penstock.request.v1 import request_pb2 as pb
from services.gateway.extras import read_extras
from tests.support.asgi import Answer, get, post
from tests.unit.gateway.test_generation import CHAT, PATIENCE_S, TEXT, Gateway, failed, gateway, until

__all__ = ["gateway"]

ASYNC = {"prefer": "respond-async"}


async def asked(gateway: Gateway, url: str, body: dict[str, Any], **headers: str) -> Answer:
    return await post(gateway.app, url, body, **ASYNC, **headers).whole()


@pytest.mark.parametrize("header", [{}, {"x_penstock_keep": "true"}, {"idempotency_key": "k"}])
async def test_the_id_comes_before_the_answer(gateway: Gateway, header: dict[str, str]) -> None:
    gateway.queue.paused = True
    answer = await asked(gateway, CHAT_URL, CHAT, **header)
    assert (answer.status, answer.json()) == (202, {"id": "r-0", "object": "request"})
    assert (answer.headers["location"], answer.headers["x-request-id"]) == ("/v1/requests/r-0", "r-0")
    assert answer.headers["preference-applied"] == "respond-async"
    assert (await get(gateway.app, answer.headers["location"]).whole()).json()["status"] == "waiting"
    await gateway.queue.finish_all()
    found = (await get(gateway.app, answer.headers["location"]).whole()).json()
    assert (found["status"], found["response"]["body"]["object"]) == ("completed", "chat.completion")
    await gateway.admission.settle(PATIENCE_S)
    assert not gateway.queue.cancelled, "nobody left"


async def test_several_prompts_have_one_id(gateway: Gateway) -> None:
    """And nobody watches them to cancel the others when one gets no answer."""
    gateway.queue.answer = failed(pb.OUTCOME_REJECTED, "context_length_exceeded", "prompt")
    answer = await asked(gateway, COMPLETIONS_URL, {**TEXT, "prompt": ["a", "b"]})
    assert answer.status == 202
    found = (await get(gateway.app, answer.headers["location"]).whole()).json()
    assert (found["id"], found["response"]["status_code"]) == (answer.json()["id"], 400)
    await gateway.admission.settle(PATIENCE_S)
    assert not gateway.queue.cancelled


async def test_who_leaves_before_the_id_came_leaves_nothing_behind(gateway: Gateway) -> None:
    """Nobody could have the answer."""
    gateway.queue.acks.clear()
    gateway.queue.paused = True
    visit = post(gateway.app, CHAT_URL, CHAT, **ASYNC)
    await until(lambda: bool(gateway.queue.requests))
    visit.leave()
    assert (await visit.whole()).status == 0
    gateway.queue.acks.set()
    await gateway.admission.settle(PATIENCE_S)
    assert gateway.queue.cancelled == ["r-0"]


async def test_a_key_brings_the_id_again(gateway: Gateway) -> None:
    answers = [await asked(gateway, CHAT_URL, CHAT, idempotency_key="k") for _ in range(2)]
    assert [answer.json()["id"] for answer in answers] == ["r-0", "r-0"]
    whole = await post(gateway.app, CHAT_URL, CHAT, idempotency_key="k").whole()
    assert (whole.status, whole.headers["x-request-id"]) == (200, "r-0")


async def test_a_stream_is_refused_by_name(gateway: Gateway) -> None:
    answer = await asked(gateway, CHAT_URL, {**CHAT, "stream": True})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "prefer")
    assert not gateway.queue.requests


async def test_what_is_wrong_is_told_as_ever(gateway: Gateway) -> None:
    assert (await asked(gateway, CHAT_URL, {**CHAT, "shiny": 1})).status == 400
    gateway.queue.refuse_submits = 100
    assert (await asked(gateway, CHAT_URL, CHAT)).status == 503


@pytest.mark.parametrize(
    ("values", "preferred"),
    [
        (["respond-async"], True),
        (["Respond-Async; x=1"], True),
        (["wait=10, respond-async"], True),
        (["respond-async", "return=minimal"], True),
        (["return=minimal", "respond-async"], True),
        (["return=minimal"], False),
        (["handling=lenient; respond-async"], False),
        ([""], False),
        ([], False),
    ],
)
def test_a_preference_that_nobody_knows_is_passed_over(values: list[str], preferred: bool) -> None:
    """As RFC 7240 has it; they come in one header or in several."""
    assert read_extras([("prefer", value) for value in values]).respond_async is preferred
