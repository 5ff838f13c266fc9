"""Lists of files and of batches are as long as was asked for, and no more of one is in memory than a page."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from penstock.errors import Unavailable
from penstock.files.v1 import files_pb2
from penstock.limits import PART_BYTES
from services.gateway import batches as batches_module
from services.gateway import files as files_module
from services.gateway.batch.records import new_batch_id
from services.gateway.batch.reruns import Reruns
from services.gateway.batches import BATCHES_URL, MAX_NAME, MAX_PAIRS, MAX_VALUE
from services.gateway.core.batch import Batch
from services.gateway.download import PIECE_BYTES
from services.gateway.files import FILES_URL
from services.gateway.listing import Listing
from services.gateway.pages import Pages, Sheet
from services.queue.files.servicer import MAX_TEXT_BYTES
from tests.support.asgi import Visit, get
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import URL, Rig, rig
from tests.unit.gateway.test_files import app_of

__all__ = ["rig"]

WORST = "\x01"
"""Six bytes of JSON, and one otherwise."""


async def with_files(rig: Rig, count: int, filename: str = "a.jsonl") -> list[str]:
    """Put so many files; return their names, the newest first."""
    names = [f"file-{number:05}" for number in range(count)]
    for name in names:
        await rig.shelf.put_view(files_pb2.CreateFileRequest(file_id=name, view="batch_1", filename=filename, bytes=7))
    return names[::-1]


def batch_of(metadata: dict[str, str]) -> Batch:
    return Batch(new_batch_id(), URL, "file-1", "24h", 1, 2, "batch", metadata=metadata)


class Reader:
    """A client that takes what it is sent when it is let, and whose connection holds nothing."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self.body = b""
        self.takes = asyncio.Event()

        async def throttled(scope: Any, receive: Any, send: Any) -> None:
            async def taken(message: Message) -> None:
                if body := message.get("body", b""):
                    self.body += body
                    await self.takes.wait()
                await send(message)

            await app(scope, receive, taken)

        self.visit = Visit(throttled, "GET", path, b"", {})


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 500])
async def test_a_list_is_what_was_asked_for_whatever_its_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(files_module, "LISTED_AT_ONCE", at_once)
    names = await with_files(rig, 7)
    app = app_of(rig)
    for query, listed, more in (
        ("", names, False),
        ("?limit=7", names, False),
        ("?limit=6", names[:6], True),
        ("?limit=1", names[:1], True),
        ("?order=asc&limit=3", names[:3:-1], True),
        (f"?after={names[2]}", names[3:], False),
        (f"?after={names[2]}&limit=4", names[3:], False),
        (f"?after={names[6]}", [], False),
        ("?purpose=batch", [], False),
    ):
        answer = await get(app, FILES_URL + query).whole()
        assert (answer.status, answer.headers["content-type"], answer.complete) == (200, "application/json", True)
        found = answer.json()
        ends = (listed[0], listed[-1]) if listed else (None, None)
        assert [file["id"] for file in found.pop("data")] == listed, query
        assert found == {"object": "list", "first_id": ends[0], "last_id": ends[1], "has_more": more}, query


async def test_a_list_of_batches_is_what_was_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "LISTED_AT_ONCE", 2)
    batches = [batch_of({"n": str(number)}) for number in range(5)]
    for batch in batches:
        await rig.records.add(batch)
    listed = [batch.to_object() for batch in batches[::-1]]
    app = app_of(rig)
    found = (await get(app, BATCHES_URL).whole()).json()
    assert (found["data"], found["has_more"], found["last_id"]) == (listed, False, listed[4]["id"])
    found = (await get(app, f"{BATCHES_URL}?limit=3&after={listed[0]['id']}").whole()).json()
    assert (found["data"], found["has_more"]) == (listed[1:4], True)


async def test_files_with_the_longest_names_are_told_a_page_at_a_time(rig: Rig) -> None:
    """Whoever takes nothing of the list is behind with pieces; the rest of it is at the queue."""
    names = await with_files(rig, 1200, WORST * MAX_TEXT_BYTES)
    pages = Pages()
    reader = Reader(app_of(rig, pages=pages), FILES_URL)
    async with asyncio.timeout(60):
        while not reader.body:
            await asyncio.sleep(0)
        assert pages.most - pages._free == 1, "a page takes a MiB at most"
        assert len(reader.body) < 2 * PIECE_BYTES
        reader.takes.set()
        answer = await reader.visit.whole()
    assert len(answer.body) > 3 * PART_BYTES
    assert [file["id"] for file in answer.json()["data"]] == names
    assert {file["filename"] for file in answer.json()["data"]} == {WORST * MAX_TEXT_BYTES}
    assert pages._free == pages.most


@pytest.mark.parametrize("url", [FILES_URL, BATCHES_URL])
async def test_who_takes_nothing_of_a_list_keeps_no_page_that_others_wait_for(rig: Rig, url: str) -> None:
    if url == FILES_URL:
        await with_files(rig, 100, WORST * MAX_TEXT_BYTES)
    else:
        metadata = {f"{number:0{MAX_NAME}}": WORST * MAX_VALUE for number in range(MAX_PAIRS)}
        for _ in range(9):
            await rig.records.add(batch_of(metadata))
    pages = Pages(1, 0.0)
    app = app_of(rig, pages=pages)
    slow = [Reader(app, url) for _ in range(3)]
    async with asyncio.timeout(60):
        whole = (await get(app, url).whole()).body
        assert len(whole) > 3 * PIECE_BYTES
        for reader in slow:
            reader.takes.set()
        assert [(await reader.visit.whole()).body for reader in slow] == [whole] * 3
    assert pages._free == pages.most


async def test_a_list_that_cannot_be_told_to_its_end_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await with_files(rig, 100, WORST * MAX_TEXT_BYTES)
    monkeypatch.setattr(files_module, "LISTED_AT_ONCE", 60)
    files, asked = rig.shelf.files, 0

    async def fail_later(*args: Any) -> tuple[list[files_pb2.File], bool]:
        nonlocal asked
        asked += 1
        if asked > allowed:
            raise Unavailable("the queue is away")
        return await files(*args)

    monkeypatch.setattr(rig.shelf, "files", fail_later)
    allowed = 0
    answer = await get(app_of(rig), FILES_URL).whole()
    assert (answer.status, answer.error["code"]) == (503, "queue_unavailable")
    allowed, asked = 1, 0
    visit = get(app_of(rig), FILES_URL)
    with pytest.raises(RuntimeError, match="already started"):
        await visit.whole()
    assert (visit.answer.status, visit.answer.complete) == (200, False)
    with pytest.raises(json.JSONDecodeError):
        visit.answer.json()


async def test_a_batch_is_brought_up_to_date_when_its_turn_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        await rig.records.add(batch_of({}))
    asked: list[str] = []
    go_on = asyncio.Event()

    async def now(_: Reruns, batch: Batch) -> Batch:
        asked.append(batch.batch_id)
        await go_on.wait()
        return replace(batch, metadata={"now": "yes"})

    monkeypatch.setattr(Reruns, "now", now)
    visit = get(app_of(rig), BATCHES_URL)

    async def is_asked() -> bool:
        return len(asked) == 1

    await wait_for_async(is_asked, "the first look")
    go_on.set()
    answer = await visit.whole()
    assert [(batch["id"], batch["metadata"]) for batch in answer.json()["data"]] == [(n, {"now": "yes"}) for n in asked]
    assert len(asked) == 3


async def test_the_end_of_a_list_is_known_also_when_its_last_page_was_let_go() -> None:
    asked: list[tuple[str, int]] = []

    async def ask(after: str, most: int) -> tuple[list[str], bool]:
        asked.append((after, most))
        names = [one for one in "abcdef" if one > after]
        return names[:most], len(names) > most

    listing = Listing(ask, str, len, "a", 4, 3)
    assert await listing.read(0) == Sheet([(1, "b"), (2, "c"), (3, "d")], 3, 3, last=False)
    for _ in range(2):
        assert await listing.read(2) == Sheet([(3, "d"), (4, "e")], 4, 2, last=True)
    assert await listing.read(4) == Sheet([], 4, 0, last=True)
    assert listing.has_more
    assert asked == [("a", 3), ("c", 2), ("c", 2)]
