"""Large answers of a POST are held in the room of downloads, whole or at the end of a stream."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from penstock.following import Inbox
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from penstock.request.v1 import request_pb2 as pb
from services.gateway.app import make_app
from services.gateway.pages import Pages
from services.gateway.places import Place
from services.gateway.reply import LARGE_BYTES, Reply
from tests.support.asgi import Visit, get, post
from tests.unit.gateway.test_generation import CHAT, Gateway, gateway, until

__all__ = ["gateway"]

TEXTS = ["x" * LARGE_BYTES, "y\u00e9" * LARGE_BYTES]
PROMPTS = ["the river", "a", "the sea"]


def large(request: pb.Request) -> pb.Result:
    """Answer with as many of the texts as are asked for."""
    texts = ["s"] if request.text == "small" else TEXTS[: request.sampling.n or 1]
    choices = [
        pb.Choice(index=index, text=text, token_ids=range(100), finish_reason=pb.FINISH_REASON_STOP)
        for index, text in enumerate(texts)
    ]
    usage = pb.Usage(prompt_tokens=1, completion_tokens=100 * len(choices))
    return pb.Result(outcome=pb.OUTCOME_COMPLETED, choices=choices, usage=usage, attempts=1, model="tiny")


@pytest.fixture
async def app(gateway: Gateway) -> Starlette:
    """Return what has room for one page at a time, which a client must take at once when others wait."""
    gateway.queue.answer = large
    return make_app(replace(gateway.parts, pages=Pages(1, 0.0)), gateway.front)


@pytest.fixture
async def no_room(gateway: Gateway) -> AsyncIterator[Place]:
    """Return what has all room there is."""
    gateway.queue.answer = large
    pages = gateway.parts.pages
    async with pages.place("another") as place:
        await place.take(pages.most)
        yield place


BODIES: dict[str, dict[str, Any]] = {
    "one": {"model": "tiny", "prompt": "the river"},
    "two choices": {"model": "tiny", "prompt": "the river", "n": 2},
    "prompts": {"model": "tiny", "prompt": PROMPTS},
    "chat": {**CHAT, "n": 2},
}


def url_of(body: dict[str, Any]) -> str:
    return CHAT_URL if "messages" in body else COMPLETIONS_URL


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def told(events: list[str]) -> tuple[dict[int, str], Any]:
    """Return the text of each choice of a whole stream, and the token counts."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    texts: dict[int, str] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        text = choice["delta"]["content"] if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, chunks[-1]["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_answer_waits_for_room_and_a_small_one_does_not(
    gateway: Gateway, no_room: Place, stream: bool
) -> None:
    body = {**BODIES["one"], "stream": stream}
    visit = post(gateway.app, COMPLETIONS_URL, body)
    await until(lambda: visit.task.done() or gateway.parts.pages.is_wanted)
    assert visit.answer.body == b""
    small = await post(gateway.app, COMPLETIONS_URL, {**body, "prompt": "small"}).whole()
    assert (small.status, visit.task.done()) == (200, False)
    no_room.give()
    answer = await visit.whole()
    assert (answer.status, answer.complete, TEXTS[0] in answer.body.decode()) == (200, True, True)
    assert gateway.parts.pages._free == gateway.parts.pages.most


@pytest.mark.parametrize("name", BODIES)
async def test_a_large_answer_is_told_whole_and_as_a_stream(gateway: Gateway, name: str) -> None:
    gateway.queue.answer = large
    body = BODIES[name]
    whole = await post(gateway.app, url_of(body), body, idempotency_key="k").whole()
    assert whole.headers["content-length"] == str(len(whole.body))
    assert whole.headers["content-type"] == "application/json"
    found = await get(gateway.app, f"/v1/requests/{whole.headers['x-request-id']}").whole()
    assert found.json()["response"]["body"] == whole.json()
    again = await post(gateway.app, url_of(body), streamed(body), idempotency_key="k").whole()
    assert again.headers["content-type"].startswith("text/event-stream")
    texts, usage = told(again.events)
    choices = whole.json()["choices"]
    assert texts == {c["index"]: c["message"]["content"] if "message" in c else c["text"] for c in choices}
    assert usage["total_tokens"] == whole.json()["usage"]["total_tokens"]
    assert gateway.parts.pages._free == gateway.parts.pages.most


class Stalled(Visit):
    """A client that takes the first piece of a body, and the next ones once it goes on."""

    async def _send(self, message: Message) -> None:
        if not hasattr(self, "goes_on"):
            self.goes_on = asyncio.Event()
        if b"xxx" in self.answer.body:
            await self.goes_on.wait()
            await asyncio.sleep(0)  # others may send meanwhile
        await super()._send(message)


def stalled(app: Starlette, body: dict[str, Any], **headers: str) -> Stalled:
    fields = {"content-type": "application/json", **headers}
    return Stalled(app, "POST", url_of(body), json.dumps(body).encode(), fields)


@pytest.mark.parametrize("body", [BODIES["one"], streamed(BODIES["prompts"]), streamed(BODIES["chat"])])
async def test_who_takes_nothing_of_one_keeps_no_room_that_others_wait_for(
    app: Starlette, body: dict[str, Any]
) -> None:
    slow = stalled(app, body)
    await until(lambda: b"xxx" in slow.answer.body)
    async with asyncio.timeout(30):
        quick = await post(app, url_of(body), body).whole()
    assert not slow.task.done()
    slow.goes_on.set()
    answer = await slow.whole()
    assert (len(answer.body), answer.complete) == (len(quick.body), True)
    assert answer.body.count(b"x" * LARGE_BYTES) == quick.body.count(b"x" * LARGE_BYTES)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_deleted_while_it_is_told_breaks_off(gateway: Gateway, app: Starlette, stream: bool) -> None:
    body = {**BODIES["one"], "stream": stream}
    slow = stalled(app, body)
    await until(lambda: b"xxx" in slow.answer.body)
    await post(app, COMPLETIONS_URL, body).whole()
    gateway.queue.results.clear()
    gateway.queue.requests.clear()
    slow.goes_on.set()
    answer = await slow.whole()
    assert (answer.status, answer.complete) == (200, False)
    assert b"error" not in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_read_again_for_who_has_hung_up(gateway: Gateway, no_room: Place, stream: bool) -> None:
    visit = post(gateway.app, COMPLETIONS_URL, {**BODIES["one"], "stream": stream})
    await until(lambda: gateway.parts.pages.is_wanted)
    visit.leave()
    assert (await visit.whole()).body == b""
    assert not gateway.parts.pages.is_wanted


async def test_a_large_result_that_was_told_while_it_was_made_ends_its_stream_at_once(
    gateway: Gateway, no_room: Place
) -> None:
    gateway.queue.tokens = [
        pb.TokenDelta(request_id="r-0", attempt=1, offset=0, token_ids=range(99), text=TEXTS[0][:-1])
    ]
    async with asyncio.timeout(30):
        answer = await post(gateway.app, COMPLETIONS_URL, streamed(BODIES["one"])).whole()
    assert told(answer.events)[0] == {0: TEXTS[0]}


async def test_no_comment_comes_in_the_midst_of_an_event(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.generation.KEEP_ALIVE_S", 0.001)
    midst = False
    comment = Reply.comment

    async def noted(reply: Reply, text: str) -> None:
        nonlocal midst
        midst = midst or b"xxx" in slow.answer.body
        await comment(reply, text)

    monkeypatch.setattr(Reply, "comment", noted)
    slow = stalled(app, streamed(BODIES["one"]))
    await until(lambda: midst)
    slow.goes_on.set()
    answer = await slow.whole()
    assert told(answer.events)[0] == {0: TEXTS[0]}


class Behind(Stalled):
    """A client that keeps the gateway waiting with the first piece."""

    async def _send(self, message: Message) -> None:
        await super()._send(message)
        if b"xxx" in self.answer.body:
            await self.goes_on.wait()


async def test_while_a_client_is_behind_its_result_is_not_held_beside_the_room(gateway: Gateway) -> None:
    """A stream whose clients take nothing would hold some MiB each for as long, whatever room there is."""
    queue = gateway.queue
    queue.answer, queue.paused = large, True
    queue.tokens = [pb.TokenDelta(request_id="r-0", attempt=1, token_ids=[0], text="xxx")]
    body = json.dumps(streamed(BODIES["one"])).encode()
    visit = Behind(gateway.app, "POST", COMPLETIONS_URL, body, {"content-type": "application/json"})
    await until(lambda: b"xxx" in visit.answer.body)
    before_bytes = inboxes_bytes()
    await queue.finish_all()
    await gateway.parts.client.result("r-0")  # so that it has come for the stream as well
    held_bytes = inboxes_bytes() - before_bytes
    visit.goes_on.set()
    assert told((await visit.whole()).events)[0] == {0: TEXTS[0]}
    assert held_bytes < LARGE_BYTES // 2
    assert gateway.parts.pages._free == gateway.parts.pages.most


def inboxes_bytes() -> int:
    """Return what all readers have not taken yet."""
    boxes = [one for one in gc.get_objects() if isinstance(one, Inbox)]
    return sum(event.ByteSize() for box in boxes for event, *_ in box._events)
