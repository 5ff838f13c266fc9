"""Large answers of `GET /v1/requests/{id}` share the room of downloads: who takes nothing of one keeps no other out."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from penstock.queue.v1.queue_pb2 import GetRequest, GetResponse
from penstock.request.v1 import request_pb2 as pb
from services.gateway.doorman import Doorman
from services.gateway.pages import Pages
from services.gateway.reply import LARGE_BYTES
from services.gateway.requests import Requests, _pieces
from services.gateway.vigil import Vigil
from tests.support.asgi import get


def requests_of(size_bytes: int, pages: Pages) -> Requests:
    """Return what serves one request, whose answer is so large."""
    result = pb.Result(
        request_id="r-1",
        outcome=pb.OUTCOME_COMPLETED,
        choices=[pb.Choice(text="x" * size_bytes)],
    )

    async def wire_get(_request: GetRequest) -> GetResponse:
        await asyncio.sleep(0)
        return GetResponse(request_id="r-1", attempts=1, result=result)

    client: Any = SimpleNamespace(wire_get=wire_get)
    return Requests(client, pages, Doorman(), Vigil())


@pytest.mark.parametrize("size_bytes", [1, LARGE_BYTES])
async def test_an_answer_is_whole_however_large_it_is(size_bytes: int) -> None:
    pages = Pages()
    app = Starlette(routes=[Route("/v1/requests/{request_id}", requests_of(size_bytes, pages).get)])
    answer = await get(app, "/v1/requests/r-1").whole()
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.json()["response"]["body"]["choices"][0]["text"] == "x" * size_bytes
    assert pages._free == pages.most


async def test_a_client_that_takes_nothing_of_a_large_answer_keeps_no_room_that_others_wait_for() -> None:
    requests = requests_of(LARGE_BYTES, Pages(1, 0.0))
    pages = [requests._page("r-1", "acme", LARGE_BYTES) for _ in range(2)]
    slow, quick = (_pieces("r-1", page, LARGE_BYTES) for page in pages)
    async with asyncio.timeout(10):
        first = await anext(slow)
        whole = b"".join([piece async for piece in quick])
        rest = [piece async for piece in slow]
    assert b"".join([first, *rest]) == whole
    assert json.loads(whole)["status"] == "completed"
