"""The application against a queue in memory: answers, streams, errors, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.client import Client
from penstock.errors import Unauthenticated, Unavailable
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from penstock.request.v1 import request_pb2 as pb
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway.admission import Admission
from services.gateway.app import Front, make_app
from services.gateway.generation import Parts
from services.gateway.intake import Intake
from services.gateway.limits import CLIENT_CLOSED
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.telemetry import Telemetry
from tests.support.asgi import get, post
from tests.support.fake_queue import FakeQueue, serving
from tests.support.waiting import wait_for_async

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "the river"}


PATIENCE_S = 30.0


class CancellableQueue(FakeQueue):
    """Remembers what was cancelled, and can hold back its acks."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled: list[str] = []
        self.acks = asyncio.Event()
        self.acks.set()

    async def _accept(self, request: pb.Request, tag: int) -> Any:
        ack = await super()._accept(request, tag)
        await self.acks.wait()
        return ack

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled += request.request_ids.ids
        return await super().Cancel(request, context)


@dataclass
class Gateway:
    app: Starlette
    queue: CancellableQueue
    front: Front
    admission: Admission
    parts: Parts


async def fleet() -> scheduler_pb2.StatusResponse:
    worker = scheduler_pb2.WorkerStatus(
        worker_id="w", model="tiny", model_aliases=["also", "poet"], adapters=["poet"], connected=True,
        max_model_len=512,
    )  # fmt: skip
    return scheduler_pb2.StatusResponse(workers=[worker])


@asynccontextmanager
async def gateway_of(address: str, queue: CancellableQueue, served: Served | None = None) -> AsyncIterator[Gateway]:
    async with Client(address, retry_for_s=0.1) as client:
        metrics = GatewayMetrics(CollectorRegistry())
        admission = Admission(client, metrics)
        parts = Parts(client, admission, Intake(5), served or Served(fleet, lambda: 0.0), metrics, Telemetry(None))
        front = Front(parts)
        yield Gateway(make_app(parts, front), queue, front, admission, parts)
        await admission.settle(PATIENCE_S)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    queue = CancellableQueue()
    async with serving(queue) as address, gateway_of(address, queue) as made:
        yield made


async def until(fact: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return fact()

    await wait_for_async(holds, "what the test is about")


async def test_an_answer(gateway: Gateway) -> None:
    answer = await post(gateway.app, COMPLETIONS_URL, TEXT, x_penstock_channel="batch").whole()
    assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "THE RIVER")
    stored = gateway.queue.requests[0]
    assert (stored.channel, stored.sampling.max_tokens, stored.model) == ("batch", 16, "tiny")
    assert answer.headers["x-request-id"] == stored.request_id
    assert not gateway.queue.cancelled


@pytest.mark.parametrize(
    ("asked", "answers"), [("tiny", "tiny"), ("also", "tiny"), ("poet", "poet")], ids=["own", "alias", "adapter"]
)
async def test_a_stream(gateway: Gateway, asked: str, answers: str) -> None:
    deltas = [("the", 1), (" ri", 2)]
    gateway.queue.answer = lambda _: pb.Result(
        outcome=pb.OUTCOME_COMPLETED, usage=pb.Usage(prompt_tokens=2, completion_tokens=3),
        choices=[pb.Choice(text="the river", token_ids=[1, 2, 3], finish_reason=pb.FINISH_REASON_STOP)],
    )  # fmt: skip
    gateway.queue.tokens = [
        pb.TokenDelta(request_id="r-0", attempt=1, offset=i, token_ids=[token], text=text)
        for i, (text, token) in enumerate(deltas)
    ]
    body = {**CHAT, "model": asked, "stream": True, "stream_options": {"include_usage": True}}
    answer = await post(gateway.app, CHAT_URL, body).whole()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in answer.events[:-1]]
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]]
    assert texts == ["", "the", " ri", "ver"]
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert {chunk["model"] for chunk in chunks} == {answers}


@pytest.mark.parametrize("prompt", ["the river", ["the river", "a"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_known_key_is_answered_though_its_model_is_gone(stream: bool, prompt: str | list[str]) -> None:
    queue = CancellableQueue()
    now_s, worker = 0.0, scheduler_pb2.WorkerStatus(worker_id="w", model="tiny", connected=True)

    async def fleet() -> scheduler_pb2.StatusResponse:
        return scheduler_pb2.StatusResponse(workers=[worker])

    async with serving(queue) as address, gateway_of(address, queue, Served(fleet, lambda: now_s)) as gateway:
        body = {**TEXT, "prompt": prompt, "stream": stream}
        first = await post(gateway.app, COMPLETIONS_URL, body, idempotency_key="k").whole()
        worker.model, now_s = "another", 3600.0
        again = await post(gateway.app, COMPLETIONS_URL, body, idempotency_key="k").whole()
        assert (again.status, again.headers["x-request-id"]) == (200, first.headers["x-request-id"])
        for headers in ({}, {"idempotency_key": "new"}):
            refused = await post(gateway.app, COMPLETIONS_URL, body, **headers).whole()
            assert (refused.status, refused.error["code"]) == (404, "model_not_found")
        assert len(queue.requests) == (1 if isinstance(prompt, str) else 2)


def failed(outcome: pb.Outcome.ValueType, code: str, param: str = "") -> Callable[[pb.Request], pb.Result]:
    return lambda _: pb.Result(outcome=outcome, error=pb.RequestError(code=code, message="why", param=param))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [
        (pb.OUTCOME_REJECTED, "context_length_exceeded", 400),
        (pb.OUTCOME_REJECTED, "model_not_found", 404),
        (pb.OUTCOME_EXPIRED, "request_expired", 408),
        (pb.OUTCOME_CANCELLED, "request_cancelled", 499),
        (pb.OUTCOME_DEAD, "attempts_exhausted", 500),
    ],
)
async def test_a_request_that_failed(
    gateway: Gateway, outcome: pb.Outcome.ValueType, code: str, status: int, stream: bool
) -> None:
    gateway.queue.answer = failed(outcome, code, "prompt")
    answer = await post(gateway.app, CHAT_URL, {**CHAT, "stream": stream}).whole()
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, "messages")
    assert answer.headers["x-should-retry"] == "false", "the openai client would ask and pay again"
    assert answer.headers["x-request-id"] == "r-0"


async def test_a_failure_after_the_first_chunk_is_an_event(gateway: Gateway) -> None:
    gateway.queue.answer = failed(pb.OUTCOME_DEAD, "attempts_exhausted")
    gateway.queue.tokens = [pb.TokenDelta(request_id="r-0", attempt=1, token_ids=[1], text="the")]
    answer = await post(gateway.app, CHAT_URL, {**CHAT, "stream": True}).whole()
    assert answer.status == 200
    error, done = answer.events[-2:]
    assert (json.loads(error)["error"]["code"], done) == ("attempts_exhausted", "[DONE]")


async def test_a_stream_never_mixes_two_answers(gateway: Gateway) -> None:
    gateway.queue.tokens = [
        pb.TokenDelta(request_id="r-0", attempt=1, token_ids=[1], text="the"),
        pb.TokenDelta(request_id="r-0", attempt=2, token_ids=[7], text="a"),
    ]
    answer = await post(gateway.app, CHAT_URL, {**CHAT, "stream": True}).whole()
    assert json.loads(answer.events[-2])["error"]["code"] == "answer_restarted"
    assert "/v1/requests/r-0" in answer.events[-2]
    assert '"a"' not in "".join(answer.events[:-2])


async def test_a_client_that_leaves_takes_its_request_along(gateway: Gateway) -> None:
    gateway.queue.paused = True
    for number, stream in enumerate((False, True)):
        visit = post(gateway.app, CHAT_URL, {**CHAT, "stream": stream})
        await until(lambda seen=number: len(gateway.queue.followed) == seen + 1)  # type: ignore[misc]
        visit.leave()
        await visit.whole()
    await gateway.admission.settle(PATIENCE_S)
    assert gateway.queue.cancelled == ["r-0", "r-1"]


@pytest.mark.parametrize("header", [{"idempotency_key": "k"}, {"x_penstock_keep": "true"}])
async def test_a_kept_request_goes_on(gateway: Gateway, header: dict[str, str]) -> None:
    gateway.queue.paused = True
    visit = post(gateway.app, CHAT_URL, {**CHAT, "logprobs": True}, **header)
    await until(lambda: bool(gateway.queue.followed))
    visit.leave()
    await visit.whole()
    await gateway.admission.settle(PATIENCE_S)
    assert not gateway.queue.cancelled
    waiting = await get(gateway.app, "/v1/requests/r-0").whole()
    assert (waiting.json()["status"], waiting.json()["response"]) == ("waiting", None)
    await gateway.queue.finish_all()
    found = (await get(gateway.app, "/v1/requests/r-0").whole()).json()
    assert (found["status"], found["response"]["status_code"]) == ("completed", 200)
    body = found["response"]["body"]
    assert body["object"] == "chat.completion", "in the shape that was asked for"
    assert body["choices"][0]["logprobs"] == {"content": []}


async def test_a_client_that_leaves_during_the_submit(gateway: Gateway) -> None:
    gateway.queue.paused = True
    gateway.queue.acks.clear()
    visit = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: bool(gateway.queue.requests))
    visit.leave()
    await visit.whole()
    assert not gateway.queue.cancelled
    gateway.queue.acks.set()
    await gateway.admission.settle(PATIENCE_S)
    assert gateway.queue.cancelled == ["r-0"]


async def test_who_is_not_let_in_is_told_before_a_body_is_read(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    class Nobodys:
        async def identify(self) -> Any:
            nonlocal asked
            asked += 1
            raise Unauthenticated("an API key is needed")

    async def never(*_: object) -> dict[str, Any]:
        raise AssertionError("nobody's body was read")

    doorman: Any = gateway.parts.doorman
    monkeypatch.setattr(doorman, "_client", Nobodys())
    monkeypatch.setattr(gateway.parts.intake, "read", never)
    for _ in range(2):
        refused = await post(gateway.app, CHAT_URL, CHAT).whole()
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert asked == 2, "what was not good is asked about each time"


async def test_a_repeated_key_gets_the_first_answer(gateway: Gateway) -> None:
    answers = [await post(gateway.app, CHAT_URL, CHAT, idempotency_key="k").whole() for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["r-0", "r-0"]
    assert answers[0].json() == answers[1].json()
    assert len(gateway.queue.requests) == 1


@pytest.mark.parametrize(
    ("fields", "headers", "status", "param"),
    [
        ({"tools": [{}]}, {}, 400, "tools.0.function"),
        ({"shiny": 1}, {}, 400, "shiny"),
        ({"max_tokens": -1}, {}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, {}, 400, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]}, {}, 400, "tools"),
        ({"\ud83d": 1}, {}, 400, r"\ud83d"),
        ({"model": "other"}, {}, 404, "model"),
        ({}, {"x_penstock_channel": "nowhere"}, 400, "x-penstock-channel"),
        ({}, {"x_penstock_wish": "1"}, 400, "x-penstock-wish"),
    ],
)
async def test_what_is_wrong_is_named(
    gateway: Gateway, fields: dict[str, Any], headers: dict[str, str], status: int, param: str
) -> None:
    answer = await post(gateway.app, CHAT_URL, {**CHAT, **fields}, **headers).whole()
    assert (answer.status, answer.error["param"]) == (status, param)
    assert answer.error["type"] == "invalid_request_error"
    assert param in answer.error["message"]


async def test_a_request_that_cannot_be_stored_is_not_asked_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.admission.MAX_REQUEST_BYTES", 1000)
    answer = await post(gateway.app, CHAT_URL, {**CHAT, "chat_template": "x" * 1000}).whole()
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert "at most 1000" in answer.error["message"]
    body = {"model": "tiny", "prompt": ["a", "x" * 1000]}
    answer = await post(gateway.app, COMPLETIONS_URL, body).whole()
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    assert not gateway.queue.requests


async def test_a_queue_that_is_away() -> None:
    queue = CancellableQueue()
    async with serving(queue) as address:
        pass
    async with gateway_of(address, queue) as gateway:
        answer = await post(gateway.app, CHAT_URL, CHAT).whole()
        assert (answer.status, answer.error["code"]) == (503, "queue_unavailable")
        assert answer.headers["retry-after"] == "2"
        assert (await get(gateway.app, "/health").whole()).status == 503
        assert (await get(gateway.app, "/live").whole()).status == 200, "a restart brings no queue back"
        assert (await get(gateway.app, "/v1/requests/r-0").whole()).status == 503


@pytest.mark.parametrize("header", [{}, {"x_penstock_keep": "true"}, {"idempotency_key": "k"}])
async def test_an_answer_that_the_queue_does_not_bring_is_had_later_and_not_paid_twice(header: dict[str, str]) -> None:
    queue = CancellableQueue()
    queue.paused = True
    running = serving(queue)
    async with gateway_of(await running.__aenter__(), queue) as gateway:
        visit = post(gateway.app, CHAT_URL, CHAT, **header)
        await until(lambda: bool(queue.followed))
        await running.__aexit__(None, None, None)
        answer = await visit.whole()
    assert (answer.status, answer.error["code"]) == (503, "queue_unavailable")
    assert "GET /v1/requests/r-0 has the answer" in answer.error["message"]
    assert answer.headers.get("x-should-retry") == (None if "idempotency_key" in header else "false")
    assert not queue.cancelled


async def test_who_leaves_while_a_body_is_sent_is_no_failure(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def take(request: Request) -> Response:
        return JSONResponse(await Intake(5).read(request.headers, request.receive))

    parts = gateway.front._parts
    visit = post(make_app(parts, gateway.front, [Route("/more", take, methods=["POST"])]), "/more", b"{")
    visit._inbox.get_nowait()  # its body does not come
    visit.leave()
    assert (await visit.whole()).status == CLIENT_CLOSED
    assert not caplog.records


async def test_at_a_stop_who_still_sends_a_body_is_told_so_wherever_it_goes(gateway: Gateway) -> None:
    async def take(request: Request) -> Response:
        return JSONResponse(await Intake(5).read(request.headers, request.receive))

    app = make_app(gateway.parts, gateway.front, [Route("/more", take, methods=["POST"])])
    for path in ("/more", CHAT_URL):
        visit = post(app, path, b"{")
        visit._inbox.get_nowait()  # its body does not come
        await asyncio.sleep(0)
        visit.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await visit.task
        assert (visit.answer.status, visit.answer.error["code"], visit.answer.complete) == (
            503,
            "gateway_stopping",
            True,
        )


async def test_a_silent_stream_sends_comments(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.generation.KEEP_ALIVE_S", 0.01)
    gateway.queue.paused = True
    visit = post(gateway.app, CHAT_URL, {**CHAT, "stream": True})
    await visit.answer.changed.wait()
    await until(lambda: visit.answer.body.count(b": waiting\n\n") >= 2)
    assert visit.answer.headers["x-request-id"] == "r-0", "told while the request waits"
    await gateway.queue.finish_all()
    answer = await visit.whole()
    assert answer.events[-1] == "[DONE]"


async def test_a_gateway_that_stops_says_where_the_answer_will_be(gateway: Gateway) -> None:
    gateway.queue.paused = True
    visit = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: bool(gateway.queue.followed))
    visit.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await visit.task
    assert (visit.answer.status, visit.answer.error["code"]) == (503, "gateway_stopping")
    assert "/v1/requests/r-0" in visit.answer.error["message"]
    assert visit.answer.headers["x-should-retry"] == "false"
    assert not gateway.queue.cancelled, "it was not the client who left"


async def test_the_rest_of_the_front(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(path: str, method: str = "GET") -> tuple[int, Any]:
        answer = await get(gateway.app, path, method).whole()
        return answer.status, answer.json()

    assert (await ask("/health")) == (200, {"status": "ok"})
    status, models = await ask("/v1/models")
    assert (status, [(card["id"], card["root"], card["parent"]) for card in models["data"]]) == (
        200,
        [("also", "tiny", None), ("poet", "poet", "tiny"), ("tiny", "tiny", None)],
    )
    assert (await ask("/v1/models/tiny"))[1]["max_model_len"] == 512
    for path, method, expected in (
        ("/v1/models/other", "GET", 404), ("/v1/requests/nobody", "GET", 404), ("/elsewhere", "GET", 404),
        ("/v1/models", "POST", 405), (CHAT_URL, "GET", 405),
    ):  # fmt: skip
        status, body = await ask(path, method)
        assert (status, body["error"]["type"]) == (expected, "invalid_request_error"), path
    gateway.front.draining = True
    assert (await ask("/health"))[0] == 503
    assert (await ask("/live"))[0] == 200, "what is stopping must not be killed for it"

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.admission, "submit", broken)
    answer = await post(gateway.app, CHAT_URL, CHAT).whole()
    assert (answer.status, answer.error["type"]) == (500, "server_error")

    async def away(*_: object) -> None:
        raise Unavailable("the disk is nearly full")

    monkeypatch.setattr(gateway.admission, "submit", away)
    assert (await post(gateway.app, CHAT_URL, CHAT).whole()).status == 503


async def test_a_queue_whose_disk_is_full_is_asked_again_later(gateway: Gateway) -> None:
    for body in (TEXT, {**TEXT, "prompt": ["a", "b"]}):
        gateway.queue.refuse_submits = 100
        refused = await post(gateway.app, COMPLETIONS_URL, body).whole()
        assert (refused.status, refused.error["code"]) == (503, "queue_unavailable")
        assert "nearly full" in refused.error["message"]
        assert int(refused.headers["retry-after"]) > 0
    gateway.queue.refuse_submits = 0
    assert (await post(gateway.app, COMPLETIONS_URL, TEXT).whole()).status == 200


async def test_deleting_a_request(gateway: Gateway) -> None:
    answer = await post(gateway.app, CHAT_URL, CHAT).whole()
    found = await get(gateway.app, f"/v1/requests/{answer.headers['x-request-id']}", "DELETE").whole()
    assert found.json() == {"id": "r-0", "object": "request.deleted", "deleted": True}
