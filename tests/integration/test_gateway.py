"""The gateway as a process, with queue, scheduler and simulated engines behind it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock as public
from penstock.openai.bodies import CHAT_URL, COMPLETIONS_URL
from services.gateway.limits import MAX_BODY_BYTES, MAX_HEAD_BYTES
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import ROOT, Fleet, Service
from tests.support.otlp import OtlpReceiver
from tests.support.waiting import wait_for, wait_for_async
from tests.support.web import ask, asked, connected, head, read_head

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

STREAMS = int(os.environ.get("GATEWAY_STREAMS", "200"))
"""Clients that stream at once; `GATEWAY_STREAMS=1000` for the number the gateway is built for."""

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
TOOL = {"type": "function", "function": {"name": "clock"}}
ROOM = ["--num-gpu-blocks-override", "20001", "--max-num-seqs", "1024"]
"""An engine that runs a thousand streams at once."""

HASTY = "from services.gateway import __main__, protocol; protocol.LINGER_S = 0.5; __main__.main()"
"""A gateway that waits half a second, and not ten, for the rest of a body that it has answered."""

ENDLESS = {"max_tokens": 2000, "ignore_eos": True}
"""Longer than any test looks at it."""


def gateway_of(fleet: Fleet, *flags: str, name: str = "gateway") -> Service:
    """Start a gateway."""
    return fleet.add_gateway(*flags, name=name)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with one fast worker and one gateway."""
    fleet = Fleet(tmp_path_factory.mktemp("gateway"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", SIMULATED_FLAGS)
        gateway_of(fleet)
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def slow_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet whose worker takes a real engine's time for its steps, and a gateway."""
    fleet = Fleet(tmp_path_factory.mktemp("slow"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", [*SIMULATED_FLAGS, "--profile", "cpu-tiny", *ROOM])
        # A queue that is killed starts again when the machine has time for it.
        gateway_of(fleet, "--queue-patience-s", "100")
        yield fleet
    finally:
        fleet.close()


def address_of(fleet: Fleet) -> str:
    return fleet.services["gateway"].address


async def streamed(address: str, body: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """Return id, text and chunks of a whole stream."""
    async with asked(address, "POST", CHAT_URL, {**body, "stream": True}) as response:
        assert response.status == 200
        events = [event async for event in response.events()]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    return response.headers["x-request-id"], text, chunks


async def test_many_streams_at_once_lose_and_reorder_nothing(slow_fleet: Fleet) -> None:
    address = address_of(slow_fleet)

    async def one(number: int) -> bool:
        body = {**CHAT, "seed": number, "max_tokens": 64, "ignore_eos": True}
        request_id, text, chunks = await streamed(address, body)
        _, found = await ask(address, "GET", f"/v1/requests/{request_id}")
        durable = found["response"]["body"]
        assert text == durable["choices"][0]["message"]["content"]
        assert durable["usage"]["completion_tokens"] == 64
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return len(chunks) > 3

    in_parts = await asyncio.gather(*(one(number) for number in range(STREAMS)))
    # One that is watched late, on a busy machine, may have all of its text at the end.
    assert sum(in_parts) > STREAMS / 2, "streams are more than their results"


BAD: dict[str, tuple[str, str, Any, dict[str, str], int, str]] = {
    "broken JSON": ("POST", CHAT_URL, b'{"model": ', {}, 400, "invalid_json"),
    "not an object": ("POST", CHAT_URL, b"[1]", {}, 400, "invalid_json"),
    "not UTF-8": ("POST", CHAT_URL, b'{"model": "\xff"}', {}, 400, "invalid_json"),
    "deep": ("POST", CHAT_URL, b"[" * 100_000, {}, 400, "invalid_json"),
    "a form": ("POST", CHAT_URL, b"model=tiny", {"content_type": "application/x-www-form-urlencoded"}, 415,
               "unsupported_media"),
    "no messages": ("POST", CHAT_URL, {"model": "tiny"}, {}, 400, "missing_parameter"),
    "wrong type": ("POST", CHAT_URL, {**CHAT, "max_tokens": "4"}, {}, 400, "invalid_value"),
    "unsupported field": ("POST", CHAT_URL, {**CHAT, "functions": [{}]}, {}, 400, "unsupported_parameter"),
    "wrong tool": ("POST", CHAT_URL, {**CHAT, "tools": [{}]}, {}, 400, "missing_parameter"),
    "no tool parser": ("POST", CHAT_URL, {**CHAT, "tools": [TOOL]}, {}, 400, "unsupported_parameter"),
    "unknown field": ("POST", COMPLETIONS_URL, {**TEXT, "shiny": 1}, {}, 400, "unknown_parameter"),
    "unknown model": ("POST", COMPLETIONS_URL, {**TEXT, "model": "no"}, {}, 404, "model_not_found"),
    "unknown channel": ("POST", CHAT_URL, CHAT, {"x_penstock_channel": "no"}, 400, "invalid_request"),
    "unknown header": ("POST", CHAT_URL, CHAT, {"x_penstock_wish": "1"}, 400, "unknown_parameter"),
    "too long": ("POST", COMPLETIONS_URL, {**TEXT, "prompt": "x" * 5000}, {}, 400, "context_length_exceeded"),
    "too long a stream": ("POST", CHAT_URL, {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}],
                                             "stream": True}, {}, 400, "context_length_exceeded"),
    "no request": ("GET", "/v1/requests/none", None, {}, 404, "not_found"),
    "no place": ("POST", "/v1/embeddings", TEXT, {}, 404, "not_found"),
    "no method": ("GET", CHAT_URL, None, {}, 405, "method_not_allowed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_answered(fleet: Fleet, name: str) -> None:
    method, path, body, headers, status, code = BAD[name]
    if code == "model_not_found":
        await asyncio.to_thread(fleet.wait_settled)
    answered, answer = await ask(address_of(fleet), method, path, body, **headers)
    assert (answered, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_too_large_a_body_is_refused_before_it_is_read(fleet: Fleet) -> None:
    async with connected(address_of(fleet)) as (reader, writer):
        writer.write(head("POST", CHAT_URL, 300 * 1024 * 1024))
        response = await read_head(reader)
        assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")
    async with connected(address_of(fleet)) as (reader, writer):
        # Without a length it is refused where it passes the limit, and the answer can be read while it goes on.
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        part = b"x" * 1024 * 1024
        for _ in range(MAX_BODY_BYTES // len(part) + 4):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        assert (await read_head(reader)).status == 413


BEFORE_IDLE_S = 40.0
"""Less than a connection may be idle: who is refused is closed before."""


async def test_slow_and_large_heads_and_slow_bodies_are_ended(fleet: Fleet) -> None:
    """And nobody else notices."""
    addresses = ["--queue-address", fleet.queue.address, "--scheduler-address", fleet.scheduler.address]
    hasty = fleet.add("gateway-hasty", [*addresses, "--head-timeout-s", "0.5", "--body-timeout-s", "0.5"])
    module = hasty.command.index("-m")
    hasty.command = [*hasty.command[:module], "-c", HASTY, *hasty.command[module + 2 :]]
    hasty.start()
    address = hasty.address
    async with connected(address) as silent, connected(address) as dripping, connected(address) as late:
        dripping[1].write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        late[1].write(head("POST", COMPLETIONS_URL, 100) + b"{")
        async with connected(address) as large:
            large[1].write(b"GET /health HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1))
            assert (await read_head(large[0])).status == 431
        assert (await ask(address, "POST", COMPLETIONS_URL, TEXT))[0] == 200
        assert await silent[0].read() == b"", "closed"
        assert await dripping[0].read() == b"", "closed"
        response = await read_head(late[0])
        assert (response.status, (await response.json())["error"]["code"]) == (408, "request_timeout")
        async with asyncio.timeout(BEFORE_IDLE_S):
            assert await late[0].read() == b"", "closed"
    assert hasty.stop() == 0


async def test_a_connection_takes_one_request_after_the_other(fleet: Fleet) -> None:
    data = json.dumps({**TEXT, "max_tokens": 2}).encode()
    async with connected(address_of(fleet)) as (reader, writer):
        for _ in range(3):
            writer.write(head("POST", COMPLETIONS_URL, len(data)) + data)
            response = await read_head(reader)
            assert (response.status, (await response.json())["object"]) == (200, "text_completion")


async def credits_home(fleet: Fleet) -> None:
    """Wait until no request runs and every block is free."""

    async def home() -> bool:
        async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:
            workers = (await client.fleet()).workers
            return all(w.free_blocks == w.capacity_blocks and not w.engine.running for w in workers)

    await wait_for_async(home, "every block to be home")


async def running(fleet: Fleet) -> None:
    """Wait until a request runs."""

    async def runs() -> bool:
        async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:
            return any(worker.engine.running for worker in (await client.fleet()).workers)

    await wait_for_async(runs, "a request to run")


async def state_of(address: str, request_id: str) -> str:
    _, found = await ask(address, "GET", f"/v1/requests/{request_id}")
    return str(found["status"])


async def test_a_client_that_leaves_sends_the_blocks_home(slow_fleet: Fleet) -> None:
    address = address_of(slow_fleet)
    async with asked(address, "POST", CHAT_URL, {**CHAT, **ENDLESS, "stream": True}) as response:
        events = response.events()
        for _ in range(3):
            await anext(events)
    request_id = response.headers["x-request-id"]
    await credits_home(slow_fleet)
    assert await state_of(address, request_id) == "cancelled"
    async with connected(address) as (_, writer):
        data = json.dumps({**CHAT, **ENDLESS}).encode()
        writer.write(head("POST", CHAT_URL, len(data)) + data)
        await running(slow_fleet)
    await credits_home(slow_fleet)


async def test_a_kept_request_outlives_its_client_and_its_gateway(slow_fleet: Fleet) -> None:
    body = {**CHAT, "max_tokens": 300, "ignore_eos": True, "stream": True}
    first = gateway_of(slow_fleet, name="gateway-first")
    async with asked(first.address, "POST", CHAT_URL, body, idempotency_key="mine") as response:
        request_id = response.headers["x-request-id"]
        await anext(response.events())
    first.kill()
    other = slow_fleet.services["gateway"]

    async def over() -> bool:
        return await state_of(other.address, request_id) == "completed"

    await wait_for_async(over, "the request to end without its client")
    async with asked(other.address, "POST", CHAT_URL, body, idempotency_key="mine") as again:
        assert again.headers["x-request-id"] == request_id
        events = [event async for event in again.events()]
    _, found = await ask(other.address, "GET", f"/v1/requests/{request_id}")
    text = "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1])
    assert text == found["response"]["body"]["choices"][0]["message"]["content"]
    assert await ask(other.address, "DELETE", f"/v1/requests/{request_id}") == (
        200, {"id": request_id, "object": "request.deleted", "deleted": True},
    )  # fmt: skip
    assert (await ask(other.address, "GET", f"/v1/requests/{request_id}"))[0] == 404


async def test_a_stream_goes_on_over_a_kill_of_the_queue(slow_fleet: Fleet) -> None:
    address = address_of(slow_fleet)
    body = {**CHAT, "max_tokens": 600, "ignore_eos": True, "stream": True}
    async with asked(address, "POST", CHAT_URL, body) as response:
        events = response.events()
        seen = [await anext(events) for _ in range(5)]
        slow_fleet.queue.kill()
        slow_fleet.queue.start()
        seen += [event async for event in events]
    assert seen.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in seen)
    _, found = await ask(address, "GET", f"/v1/requests/{response.headers['x-request-id']}")
    assert text == found["response"]["body"]["choices"][0]["message"]["content"]
    assert found["response"]["body"]["usage"]["completion_tokens"] == 600


async def test_a_gateway_that_is_told_to_stop_finishes_its_streams(slow_fleet: Fleet) -> None:
    gateway = gateway_of(slow_fleet, name="gateway-stopped")
    body = {**CHAT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with asked(gateway.address, "POST", CHAT_URL, body) as response:
        events = response.events()
        await anext(events)
        stopped = asyncio.create_task(asyncio.to_thread(gateway.stop))
        rest = [event async for event in events]
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert await stopped == 0
    with pytest.raises(ConnectionRefusedError):
        await ask(gateway.address, "GET", "/health")


async def test_a_gateway_whose_grace_is_over_tells_its_clients_and_logs_no_failure(slow_fleet: Fleet) -> None:
    gateway = gateway_of(slow_fleet, "--shutdown-grace-s", "1", name="gateway-cutting")
    body = {**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with asked(gateway.address, "POST", CHAT_URL, body) as response:
        events = response.events()
        await anext(events)
        stopped = asyncio.create_task(asyncio.to_thread(gateway.stop))
        rest = [event async for event in events]
    assert json.loads(rest[-2])["error"]["code"] == "gateway_stopping"
    assert await stopped == 0
    assert "Cancel 1 running task" in gateway.log()
    assert "Traceback" not in gateway.log()


async def test_a_gateway_that_stops_waits_for_a_queue_that_is_away_no_longer_than_its_grace(slow_fleet: Fleet) -> None:
    flags = ["--shutdown-grace-s", "1", "--queue-patience-s", "600"]
    gateway = gateway_of(slow_fleet, *flags, name="gateway-leaving")
    body = {**CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with asked(gateway.address, "POST", CHAT_URL, body) as response:
        await anext(response.events())
        slow_fleet.queue.kill()
    assert await asyncio.to_thread(gateway.stop) == 0
    slow_fleet.queue.start()
    assert "the queue has not answered" in gateway.log()


async def test_a_request_waits_for_a_worker_until_its_deadline(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    address = gateway_of(fleet).address
    assert (await ask(address, "GET", "/v1/models"))[1] == {"object": "list", "data": []}
    body = {**TEXT, "model": "later"}
    status, answer = await ask(address, "POST", COMPLETIONS_URL, body, x_penstock_deadline_ms="300")
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
    assert answer["error"]["param"] == "x-penstock-deadline-ms"
    status, answer = await ask(address, "POST", COMPLETIONS_URL, body, x_penstock_deadline_ms="1")
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded"), (
        "also where it passes on the way to the queue"
    )
    waiting = asyncio.create_task(ask(address, "POST", COMPLETIONS_URL, body))
    await asyncio.to_thread(fleet.add_worker, "w1", ["--engine", "simulated", "--served-model-name", "later"])
    status, answer = await waiting
    assert (status, answer["model"]) == (200, "later")


async def test_who_takes_the_id_alone_has_the_answer_by_it_whatever_becomes_of_the_gateway(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    first = gateway_of(fleet, name="gateway-first")
    body = {**TEXT, "model": "later"}  # no worker is there
    async with asked(first.address, "POST", COMPLETIONS_URL, body, prefer="respond-async") as response:
        place, request_id = response.headers["location"], response.headers["x-request-id"]
        assert (response.status, await response.json()) == (202, {"id": request_id, "object": "request"})
    assert place == f"/v1/requests/{request_id}"
    assert await state_of(first.address, request_id) == "waiting", "also when its client has gone"
    first.kill()
    other = gateway_of(fleet)
    await asyncio.to_thread(fleet.add_worker, "w1", ["--engine", "simulated", "--served-model-name", "later"])

    async def over() -> bool:
        return await state_of(other.address, request_id) == "completed"

    await wait_for_async(over, "the request to end")
    _, found = await ask(other.address, "GET", place)
    assert (found["response"]["status_code"], found["response"]["body"]["model"]) == (200, "later")


async def test_a_full_disk_is_answered_with_the_time_to_ask_again(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(queue_flags=["--disk-free-min-bytes", str(2**60)])
    address = gateway_of(fleet, "--queue-patience-s", "0").address
    for body in (TEXT, {**TEXT, "prompt": ["a", "b"]}, {**TEXT, "stream": True}):
        async with asked(address, "POST", COMPLETIONS_URL, body) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) > 0
            assert "disk" in (await response.json())["error"]["message"]
    assert (await ask(address, "GET", "/v1/requests/none"))[0] == 404, "reading goes on"


async def test_the_queue_is_away(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    address = gateway_of(fleet, "--queue-patience-s", "0.2").address
    fleet.queue.kill()
    async with asked(address, "POST", CHAT_URL, CHAT) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "2")
        assert (await response.json())["error"]["code"] == "queue_unavailable"
    assert (await ask(address, "GET", "/health"))[0] == 503


def test_a_port_that_is_taken_is_said(fleet: Fleet) -> None:
    second = fleet.add("gateway-2", [])
    second.command = [*second.command[:4], address_of(fleet)]
    second.start(wait=False)
    assert second.wait_exit() == 69
    assert "cannot listen on" in second.log()


async def test_metrics_are_told_and_documented(fleet: Fleet) -> None:
    await ask(address_of(fleet), "POST", COMPLETIONS_URL, TEXT)
    async with asked(address_of(fleet), "GET", "/metrics") as response:
        text = b"".join([part async for part in response.parts()]).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE penstock_gateway_")}
    assert f'penstock_gateway_requests_total{{endpoint="{COMPLETIONS_URL}",status="200"}}' in text
    listed = (ROOT / "docs/observability.md").read_text()
    assert len(names) == 13
    assert not {name for name in names if f"`{name}`" not in listed}


async def test_the_gateways_span_is_the_parent_of_the_request(make_fleet: Callable[..., Fleet]) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with OtlpReceiver() as receiver:
        fleet = make_fleet(environment=receiver.environment)
        fleet.add_worker("w1", SIMULATED_FLAGS)
        gateway = gateway_of(fleet)
        async with asked(
            gateway.address, "POST", COMPLETIONS_URL, TEXT, traceparent=f"00-{trace}-b7ad6b7169203331-01"
        ) as response:
            await response.json()

        def spans() -> dict[str, Any]:
            return {span.name: span for span in receiver.of_trace(trace)}

        wait_for(lambda: {"gateway.request", "queue.persist", "queue.complete"} <= spans().keys(), "the spans")
        ours = spans()["gateway.request"]
        assert (ours.service, ours.parent_id) == ("penstock-gateway", "b7ad6b7169203331")
        assert spans()["queue.persist"].parent_id == ours.span_id
        assert ours.attributes["penstock.request.id"] == response.headers["x-request-id"]
        assert ours.attributes["http.response.status_code"] == 200
        fleet.close()  # while there is somebody to take the last spans
