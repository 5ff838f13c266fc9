"""Forms parsed as they arrive, and uploads that never hold more than two parts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from penstock.files.v1 import files_pb2 as pb
from penstock.limits import PART_BYTES
from services.gateway.intake import ClientGoneError
from services.gateway.multipart import MAX_FIELD_BYTES, Form
from services.gateway.places import HELD_BYTES, Places, WantedError
from services.gateway.problem import Problem
from services.gateway.shelf import Shelf
from services.gateway.upload import Upload
from tests.support.waiting import wait_for_async

TYPE = "multipart/form-data; boundary=edge"


def form_of(*parts: tuple[str, bytes], end: bytes = b"--edge--\r\n") -> bytes:
    """Return a form; the part called `file` has a file name."""
    body = b""
    for name, value in parts:
        more = '; filename="in.jsonl"' if name == "file" else ""
        body += f'--edge\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
    return body + end


def cut(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(min(place, len(body)) for place in cuts), len(body)]
    for start, end in itertools.pairwise(places):
        yield body[start:end]


CONTENT = st.lists(st.sampled_from([b"\r\n", b"--edge", b"--", b"-", b"\r", b"\n", b"edge", b"x", b"\0"]), max_size=12)


@given(
    CONTENT.map(b"".join).filter(lambda c: b"\r\n--edge" not in b"\r\n" + c), st.lists(st.integers(0, 300), max_size=8)
)
def test_a_form_is_the_same_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    form = Form(TYPE)
    for piece in cut(form_of(("purpose", b"batch"), ("file", content)), cuts):
        form.feed(piece)
    form.finish()
    assert form.fields == {"purpose": "batch"}
    assert (form.filename, bytes(form.content)) == ("in.jsonl", content)


BAD_FORMS = [
    (b"no form at all", "not a form"),
    (form_of(("file", b"x"), end=b""), "ends before"),
    (form_of(("purpose", b"batch")), "file: is missing"),
    (form_of(("file", b"x"), ("file", b"y")), "given twice"),
    (form_of(("purpose", b"x" * (MAX_FIELD_BYTES + 1)), ("file", b"")), "at most"),
    (form_of(*((f"f{n}", b"") for n in range(17)), ("file", b"")), "more than 16 fields"),
    (b"--edge\r\ncontent-type: a\r\n\r\nx\r\n--edge--\r\n", "has no name"),
    (b"--edge\r\nx: " + b"y" * 10_000 + b"\r\n\r\nx\r\n--edge--\r\n", "not a form"),
]


@pytest.mark.parametrize(("body", "text"), BAD_FORMS, ids=[text for _, text in BAD_FORMS])
def test_what_is_no_form_is_refused(body: bytes, text: str) -> None:
    form = Form(TYPE)

    def parse() -> None:
        form.feed(body)
        form.finish()

    with pytest.raises(Problem, match=text) as problem:
        parse()
    assert problem.value.status == 400


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "", "multipart/form-data; boundary="])
def test_another_content_type_is_415(kind: str) -> None:
    with pytest.raises(Problem) as problem:
        Form(kind)
    assert problem.value.status == 415


class Kept:
    """A shelf that notes what it is told."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.closed: pb.CloseFileRequest | None = None

    async def begin(self, file_id: str) -> None:
        self.files[file_id] = b""

    async def append(self, file_id: str, offset: int, data: bytes) -> None:
        assert offset == len(self.files[file_id])
        assert offset % PART_BYTES == 0
        assert len(data) <= PART_BYTES
        self.files[file_id] += data

    async def end(self, request: pb.CloseFileRequest) -> pb.File:
        assert request.bytes == len(self.files[request.file_id])
        self.closed = request
        return pb.File(file_id=request.file_id, bytes=request.bytes)

    async def delete(self, file_id: str) -> bool:
        return self.files.pop(file_id, None) is not None


async def upload(
    shelf: Kept, body: bytes, most_bytes: int = 10**9, gone: bool = False, coding: bytes = b"identity"
) -> pb.File:
    """Upload `body` in pieces of 64 KiB, as a server's connection gives them."""
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    headers = [(b"content-type", TYPE.encode()), (b"content-encoding", coding)]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return await Upload(cast(Shelf, shelf), Places(1), most_bytes, 5.0).receive(Request(scope, receive), "acme")


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 5])
async def test_a_file_leaves_in_whole_parts(size: int) -> None:
    shelf, content = Kept(), bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    limits = ("expires_after[anchor]", b"created_at"), ("expires_after[seconds]", b"3600")
    file = await upload(shelf, form_of(("file", content), ("purpose", b"batch"), *limits))
    assert shelf.files == {file.file_id: content}
    assert shelf.closed is not None
    assert (shelf.closed.purpose, shelf.closed.filename) == ("batch", "in.jsonl")
    assert shelf.closed.expires_after_ns == 3600 * 10**9


@pytest.mark.parametrize(
    ("body", "most_bytes", "status"),
    [
        (form_of(("file", bytes(2 * PART_BYTES)), ("purpose", b"batch")), PART_BYTES, 413),
        (form_of(("file", bytes(2 * PART_BYTES)), ("purpose", b"vision")), 10**9, 400),
        (form_of(("file", bytes(2 * PART_BYTES))), 10**9, 400),
        (form_of(("file", bytes(2 * PART_BYTES)), ("purpose", b"batch"), end=b""), 10**9, 400),
    ],
)
async def test_an_upload_that_is_refused_leaves_nothing(body: bytes, most_bytes: int, status: int) -> None:
    shelf = Kept()
    with pytest.raises(Problem) as problem:
        await upload(shelf, body, most_bytes)
    assert (problem.value.status, shelf.files, shelf.closed) == (status, {}, None)


async def test_a_compressed_form_is_415() -> None:
    with pytest.raises(Problem) as problem:
        await upload(Kept(), form_of(("file", b"{}"), ("purpose", b"batch")), coding=b"gzip")
    assert (problem.value.status, problem.value.error["param"]) == (415, "content-encoding")


async def test_a_client_that_goes_away_leaves_nothing() -> None:
    shelf = Kept()
    with pytest.raises(ClientGoneError):
        await upload(shelf, form_of(("file", bytes(3 * PART_BYTES)), ("purpose", b"batch"), end=b""), gone=True)
    assert shelf.files == {}


class Sender:
    """A client whose upload comes as it is told."""

    def __init__(self, shelf: Kept, places: Places, tenant: str = "acme") -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", TYPE.encode())]}
        request = Request(scope, self.messages.get)
        self.upload = Upload(cast(Shelf, shelf), places, 10**9, 60.0)
        self.ends = asyncio.create_task(self.upload.receive(request, tenant))

    def send(self, data: bytes, more: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    async def is_heard(self) -> None:
        """Wait until all that was sent is taken."""
        await wait_for_async(self._nothing_left, "all that was sent to be taken")

    async def _nothing_left(self) -> bool:
        return self.messages.empty()


def begun(size_bytes: int) -> bytes:
    """Return the beginning of a form, as far as so many bytes of its file."""
    whole = form_of(("purpose", b"batch"), ("file", bytes(size_bytes)), end=b"")
    return whole.removesuffix(b"\r\n")


END = b"\r\n--edge--\r\n"


async def test_who_finds_no_room_waits_with_what_its_connection_holds() -> None:
    shelf, places = Kept(), Places(1, 1000, 1000)
    first, second = Sender(shelf, places), Sender(shelf, places)
    first.send(begun(PART_BYTES - 1))
    await first.is_heard()
    second.send(begun(5))
    await second.is_heard()
    second.send(END, more=False)
    await is_wanted(places)
    assert (second.messages.qsize(), list(shelf.files)) == (1, [first.upload.file_id])
    first.send(b"x" + END, more=False)
    assert [(await sender.ends).bytes for sender in (first, second)] == [PART_BYTES, 5]
    assert not places.is_wanted_of("acme")


async def is_wanted(places: Places, tenant: str = "acme") -> None:
    async def so() -> bool:
        return places.is_wanted_of(tenant)

    await wait_for_async(so, "a place to be waited for")


async def test_who_waits_is_read_between_two_parts_of_a_long_upload() -> None:
    shelf, places = Kept(), Places(1, 1000, 1000)
    first, second = Sender(shelf, places), Sender(shelf, places)
    first.send(begun(PART_BYTES - 1))
    await first.is_heard()
    second.send(begun(5) + END, more=False)
    await is_wanted(places)
    first.send(bytes(2))
    assert (await second.ends).bytes == 5
    assert len(shelf.files[first.upload.file_id]) == PART_BYTES, "nothing of it but the next part is in memory"
    first.send(bytes(PART_BYTES) + END, more=False)
    assert (await first.ends).bytes == 2 * PART_BYTES + 1


async def test_who_has_sent_next_to_nothing_keeps_no_place() -> None:
    """Neither in a field of the form nor in its file, and however long it takes."""
    shelf, places = Kept(), Places(1, 1000, 1000)
    slow = [Sender(shelf, places) for _ in range(3)]
    for sender, data in zip(slow, [begun(HELD_BYTES), begun(1), begun(1)[:60]], strict=True):
        sender.send(data)
        await sender.is_heard()
    fast = Sender(shelf, places)
    fast.send(begun(3 * PART_BYTES) + END, more=False)
    assert (await fast.ends).bytes == 3 * PART_BYTES
    for sender in slow[:2]:
        sender.send(END, more=False)
    assert [(await sender.ends).bytes for sender in slow[:2]] == [HELD_BYTES, 1]
    slow[2].ends.cancel()
    await asyncio.wait([slow[2].ends])


async def test_who_sends_too_little_has_a_place_until_others_wait() -> None:
    shelf, places = Kept(), Places(1, 0.0, 0.0)
    slow = Sender(shelf, places)
    for data in (begun(PART_BYTES - 9), b"x", b"x"):
        slow.send(data)
        await slow.is_heard()
    other = Sender(shelf, places)
    other.send(begun(5) + END, more=False)
    with pytest.raises(Problem, match="others wait to upload") as problem:
        await slow.ends
    assert (problem.value.status, problem.value.error["code"]) == (503, "overloaded")
    assert (await other.ends).bytes == 5
    assert list(shelf.files) == [other.upload.file_id]


async def test_not_more_are_too_slow_than_wait() -> None:
    shelf, places = Kept(), Places(3, 0.0, 0.0)
    slow = [Sender(shelf, places, tenant) for tenant in ("acme", "acme", "other")]
    for sender in slow:
        sender.send(begun(PART_BYTES - 1))
        await sender.is_heard()
    fast = Sender(shelf, places, "third")
    fast.send(begun(5) + END, more=False)
    assert (await fast.ends).bytes == 5
    ended = [sender.ends.done() for sender in slow]
    assert ended == [True, False, False], "the first of those of the tenant that has the most"
    for sender in slow[1:]:
        sender.send(b"x" + END, more=False)
    assert [(await sender.ends).bytes for sender in slow[1:]] == [PART_BYTES] * 2
    with pytest.raises(Problem):
        await slow[0].ends


async def test_a_tenant_leaves_places_to_the_next() -> None:
    shelf, places = Kept(), Places(8, 1000, 1000)
    many = [Sender(shelf, places) for _ in range(9)]
    for sender in many:
        sender.send(begun(PART_BYTES - 1))
    await is_wanted(places)
    fast = Sender(shelf, places, "other")
    fast.send(begun(3 * PART_BYTES) + END, more=False)
    assert (await fast.ends).bytes == 3 * PART_BYTES
    assert not any(sender.ends.done() for sender in many)
    for sender in many:
        sender.send(b"x" + END, more=False)
    assert {(await sender.ends).bytes for sender in many} == {PART_BYTES}


async def test_tenants_have_places_in_turns() -> None:
    places, had = Places(1), list[str]()

    async def have(tenant: str) -> None:
        async with places.place(tenant) as place:
            await place.take()
            had.append(tenant)

    async with places.place("a") as first:
        await first.take()
        waiting = [asyncio.create_task(have(tenant)) for tenant in "aaabbc"]
        await is_wanted(places, "c")
    await asyncio.gather(*waiting)
    assert "".join(had) == "abcaba"


@pytest.mark.parametrize("given", [False, True], ids=["waiting", "in the moment it has the place"])
async def test_who_is_stopped_while_it_waits_leaves_the_place_to_the_next(given: bool) -> None:
    places = Places(1)
    async with places.place("a") as first:
        await first.take()
        stopped, last = (asyncio.create_task(places.take(tenant)) for tenant in "bc")
        await is_wanted(places, "c")
        if not given:
            stopped.cancel()
    if given:
        stopped.cancel()
    await last
    with pytest.raises(asyncio.CancelledError):
        await stopped
    assert not places.is_wanted_of("b")


async def test_what_had_come_of_an_upload_that_ends_is_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[Form] = []

    class Noted(Form):
        def __init__(self, content_type: str) -> None:
            super().__init__(content_type)
            forms.append(self)

    monkeypatch.setattr("services.gateway.upload.Form", Noted)
    with pytest.raises(ClientGoneError):
        await upload(Kept(), begun(PART_BYTES - 1), gone=True)
    assert not forms[0].content


async def test_who_leaves_while_it_waits_takes_no_place_along() -> None:
    shelf, places = Kept(), Places(1, 1000, 1000)
    first, second, third = (Sender(shelf, places) for _ in range(3))
    first.send(begun(PART_BYTES - 1))
    await first.is_heard()
    second.send(begun(5))
    await is_wanted(places)
    second.ends.cancel()
    await asyncio.wait([second.ends])
    first.send(END, more=False)
    third.send(begun(7) + END, more=False)
    assert [(await sender.ends).bytes for sender in (first, third)] == [PART_BYTES - 1, 7]


async def test_more_that_comes_in_the_moment_in_which_an_upload_is_to_end_saves_it_but_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, more = Places(1, 30.0, 0.01), asyncio.Event()
    end_latest, looks = places._end_latest, 0

    def end_latest_as_more_comes() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            more.set()
        end_latest()

    monkeypatch.setattr(places, "_end_latest", end_latest_as_more_comes)
    rounds = 0

    async def slow() -> None:
        nonlocal rounds
        async with places.place("acme") as place:
            await place.take()
            while True:
                async with place.listening():
                    await more.wait()
                more.clear()
                rounds += 1

    uploading = asyncio.create_task(slow())
    await asyncio.sleep(0)
    async with asyncio.timeout(60), places.place("other") as place:
        await place.take()
    with pytest.raises(WantedError):
        await uploading
    assert (rounds, looks) == (1, 2)
