"""Large answers of `GET /v1/requests/{id}` share the room of downloads: who takes nothing of one keeps no other out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from penstock.connection import Turn
from penstock.openai.jsontext import json_bytes
from penstock.queue.v1.queue_pb2 import GetRequest, GetResponse, IdentifyResponse
from penstock.request.v1 import request_pb2 as pb
from penstock.results import Cancelled
from services.gateway import pages as pages_module
from services.gateway.doorman import Doorman
from services.gateway.group import Group
from services.gateway.intake import ClientGoneError
from services.gateway.limits import MAX_ANSWERS_BYTES, MAX_LOOKING
from services.gateway.lookup import Lookup, pieces_of
from services.gateway.pages import PLACE_BYTES, Pages
from services.gateway.problem import Problem
from services.gateway.reply import LARGE_BYTES
from services.gateway.requests import Requests, described
from services.gateway.vigil import Vigil
from tests.support.asgi import Visit, get
from tests.support.waiting import wait_for_async


def client_of(size_bytes: int) -> Any:
    """Return the part of a client that looks up one request, whose answer is so large."""
    result = pb.Result(
        request_id="r-1",
        outcome=pb.OUTCOME_COMPLETED,
        choices=[pb.Choice(text="x" * size_bytes)],
    )

    async def wire_get(_request: GetRequest, turn: Turn) -> GetResponse:
        async with turn():
            await asyncio.sleep(0)
        return GetResponse(request_id="r-1", attempts=1, result=result)

    return SimpleNamespace(wire_get=wire_get)


@pytest.mark.parametrize("size_bytes", [1, LARGE_BYTES])
async def test_an_answer_is_whole_however_large_it_is(size_bytes: int) -> None:
    pages = Pages()
    app = Starlette(
        routes=[Route("/v1/requests/{request_id}", Requests(client_of(size_bytes), pages, Doorman(), Vigil()).get)]
    )
    answer = await get(app, "/v1/requests/r-1").whole()
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.json()["response"]["body"]["choices"][0]["text"] == "x" * size_bytes
    assert pages._free == pages.most


async def test_a_client_that_takes_nothing_of_a_large_answer_keeps_no_room_that_others_wait_for() -> None:
    looks = Lookup(client_of(LARGE_BYTES), Pages(1, 0.0))
    pages = [looks.page("r-1", "acme", LARGE_BYTES) for _ in range(2)]
    slow, quick = (pieces_of(page, lambda found: json_bytes(described("r-1", found)), LARGE_BYTES) for page in pages)
    async with asyncio.timeout(30):
        first = await anext(slow)
        whole = b"".join([piece async for piece in quick])
        rest = [piece async for piece in slow]
    assert b"".join([first, *rest]) == whole
    assert json.loads(whole)["status"] == "completed"


class Slow:
    """The part of a client that looks requests up: each look takes until it is let go on."""

    def __init__(self, answer_bytes: int) -> None:
        self.answer_bytes = answer_bytes
        self.asked = self.most = 0
        """Looks under way, and at most."""
        self.ends = asyncio.Event()
        self.running = ""
        self.cancelled: list[str] = []

    async def wire_get(self, request: GetRequest, turn: Turn) -> GetResponse:
        async with turn():
            self.asked += 1
            self.most = max(self.most, self.asked)
            try:
                await asyncio.sleep(0)
                if request.request_id != "small":
                    await self.ends.wait()
            finally:
                self.asked -= 1
        text = "x" * (1 if request.request_id == "small" else self.answer_bytes)
        result = pb.Result(request_id="r-1", outcome=pb.OUTCOME_COMPLETED, choices=[pb.Choice(text=text)])
        return GetResponse(request_id="r-1", attempts=1, result=result)

    async def delete(self, *_ids: str) -> int:
        return 0

    async def cancel(self, *ids: str, batch: str | None = None) -> Cancelled:
        """Find nothing to cancel, but for what has the name of one that runs."""
        if self.running in {*ids, batch}:
            self.cancelled.append(self.running)
            return Cancelled(1, 0, ())
        return Cancelled(0, 0, ids)


class ByHeader(Doorman):
    """Takes the header for the tenant."""

    async def let_in(self, authorization: str) -> IdentifyResponse:
        """Say that it is good."""
        return IdentifyResponse(role="client", tenant=authorization)


def app_of(slow: Slow, pages: Pages) -> Starlette:
    client: Any = slow
    requests = Requests(client, pages, ByHeader(), Vigil())
    routes = [Route("/v1/requests/{request_id}", requests.get), Route("/d/{request_id}", requests.delete)]
    return Starlette(routes=routes)


def asked_by(tenant: str, app: Starlette, path: str) -> Visit:
    return Visit(app, "GET", path, b"", {"authorization": tenant})


async def until(fact: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return fact()

    await wait_for_async(holds, "what the test is about")


@pytest.mark.parametrize("name", ["r-2", Group("several-" + "1" * 32, 4).name])
async def test_what_runs_is_cancelled_however_many_looks_wait(name: str) -> None:
    slow, pages = Slow(1), Pages()
    group = Group.named(name)
    slow.running = name if group is None else group.batch
    many = [asked_by("a", app_of(slow, pages), "/v1/requests/r-1") for _ in range(50)]
    await until(lambda: slow.asked == MAX_LOOKING - 1)
    answer = await asked_by("a", app_of(slow, pages), f"/d/{name}").whole()
    assert answer.json() == {"id": name, "object": "request.deleted", "deleted": False}
    assert slow.cancelled == [slow.running]
    for one in many:
        one.leave()
    await asyncio.gather(*[one.task for one in many], return_exceptions=True)


@pytest.mark.parametrize("name", ["r-1", Group("several-" + "0" * 32, 4).name])
@pytest.mark.parametrize("path", ["/v1/requests", "/d"])
async def test_few_are_looked_up_at_once_and_no_tenant_keeps_others_waiting(name: str, path: str) -> None:
    slow, pages = Slow(1), Pages()
    app = app_of(slow, pages)
    many = [asked_by("a", app, f"{path}/{name}") for _ in range(50)]
    await until(lambda: slow.asked == MAX_LOOKING - 1)
    answer = await asked_by("b", app, "/v1/requests/small").whole()
    assert (answer.status, slow.asked, slow.most) == (200, MAX_LOOKING - 1, MAX_LOOKING)
    for one in many:
        one.task.cancel()
    await asyncio.gather(*[one.task for one in many], return_exceptions=True)
    assert pages.looking._free == MAX_LOOKING


@pytest.mark.parametrize("name", ["r-1", Group("several-" + "0" * 32, 4).name])
@pytest.mark.parametrize("path", ["/v1/requests", "/d"])
async def test_nothing_is_looked_up_for_who_has_hung_up(name: str, path: str) -> None:
    slow, pages = Slow(1), Pages()
    many = [asked_by("a", app_of(slow, pages), f"{path}/{name}") for _ in range(50)]
    await until(lambda: slow.asked == MAX_LOOKING - 1)
    for one in many:
        one.leave()
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*[one.task for one in many], return_exceptions=True)
    assert {type(end) for end in ends} == {ClientGoneError}
    assert slow.asked == 0
    assert pages.looking._free == MAX_LOOKING


async def test_who_waits_long_for_a_look_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "LOOK_WAIT_S", 0.01)
    slow, pages = Slow(1), Pages()
    requests = app_of(slow, pages)
    async with pages.looking.place("a") as place:
        await place.take(MAX_LOOKING)
        with pytest.raises(Problem) as refused:
            await asked_by("a", requests, "/v1/requests/r-1").whole()
    assert (refused.value.status, refused.value.error["code"]) == (503, "overloaded")
    assert refused.value.headers["retry-after"]


async def test_of_large_answers_of_several_prompts_few_are_read_at_once() -> None:
    """Else a look at some MiB would have all of them in memory, and be one of several."""
    slow, pages, count = Slow(PLACE_BYTES // 3), Pages(), 30
    slow.ends.set()
    client: Any = slow
    name = Group("several-" + "0" * 32, count).name
    found = await Lookup(client, pages).look(name, "a", LARGE_BYTES)
    assert count * slow.answer_bytes < found.size_bytes < MAX_ANSWERS_BYTES
    assert slow.most <= 3
    assert sum(one.ByteSize() for one in found.each) < LARGE_BYTES
    assert len(found.each) == count
    answer = await get(app_of(slow, pages), f"/v1/requests/{name}").whole()
    assert (answer.status, len(answer.json()["response"]["body"]["choices"])) == (200, count)
    assert pages._free == pages.most


async def test_pages_are_read_by_turns_of_tenants() -> None:
    """Else who asks for one page would wait for all of another's."""
    slow, pages = Slow(LARGE_BYTES), Pages()
    app = app_of(slow, pages)
    slow.ends.set()
    held = [pages.reading.place("a") for _ in range(3)]
    async with held[0] as one, held[1] as two, held[2] as three:
        for place in (one, two, three):
            await place.take()
        waits = asked_by("a", app, "/v1/requests/r-1")
        answer = await asked_by("b", app, "/v1/requests/r-1").whole()
        assert (answer.status, waits.answer.status) == (200, 0)
    assert (await waits.whole()).status == 200
