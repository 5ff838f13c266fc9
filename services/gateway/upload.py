"""`POST /v1/files`: a file goes to the queue as it arrives, a part at a time, whatever its size."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message

from penstock.errors import PenstockError
from penstock.files.v1 import files_pb2 as pb
from penstock.limits import PART_BYTES
from services.gateway.expiry import read_expiry
from services.gateway.intake import CLOSE, ClientGoneError, check_uncompressed
from services.gateway.limits import RETRY_AFTER_S
from services.gateway.multipart import MAX_FIELD_BYTES, MAX_FIELDS, Form
from services.gateway.places import HELD_BYTES, Place, Places, WantedError
from services.gateway.problem import Problem
from services.gateway.shelf import Shelf

PURPOSE = "batch"
OTHER_PURPOSES = ("assistants", "fine-tune", "vision", "user_data", "evals")
"""What OpenAI takes files for besides; refused by name."""

KNOWN_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

MAX_FILENAME_BYTES = 512
"""As the queue takes it."""

FRAME_BYTES = MAX_FIELDS * 2 * MAX_FIELD_BYTES
"""Most a form adds to its file."""


def new_file_id() -> str:
    """Draw a name: names of files sort by when they were drawn."""
    return f"file-{time.time_ns():016x}{secrets.token_hex(8)}"


class Upload:
    """One upload. Two parts are in memory at most: one that fills, and one on its way to the queue."""

    def __init__(self, shelf: Shelf, places: Places, most_bytes: int, silence_s: float) -> None:
        """Put a file of at most `most_bytes` on `shelf` while it has one of `places`.

        A client that says nothing for `silence_s` has gone.
        """
        self._shelf = shelf
        self._places = places
        self._most_bytes = most_bytes
        self._silence_s = silence_s
        self.file_id = new_file_id()
        self._begun = False
        self.bytes = 0
        """Of the file, that have left for the queue."""
        self._sending: asyncio.Task[None] | None = None

    async def receive(self, request: Request, tenant: str) -> pb.File:
        """Return the closed file of a tenant's.

        Raises Problem or ClientGoneError, and then nothing is left of the file.
        """
        check_uncompressed(request.headers)
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._most_bytes + FRAME_BYTES:
            raise self._too_large()
        form = Form(request.headers.get("content-type", ""))
        async with self._places.place(tenant) as place:
            try:
                closing = await self._read(form, request, place)
                return await self._shelf.end(closing)
            except BaseException:
                await asyncio.shield(self._drop())
                raise
            finally:
                form.content.clear()  # its parser and it hold each other

    async def _read(self, form: Form, request: Request, place: Place) -> pb.CloseFileRequest:
        more = True
        while more:
            await self._leave(form, place)
            message = await self._next(form, request, place)
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            more = message.get("more_body", False)
            await place.take()
            data = message.pop("body", b"")
            place.came(len(data))
            form.feed(data)
            del data  # while more is waited for
            await self._take(form, place)
        form.finish()
        closing = described(form)
        await self._take(form, None)
        await self._sent()
        closing.file_id, closing.bytes = self.file_id, self.bytes
        return closing

    async def _next(self, form: Form, request: Request, place: Place) -> Message:
        """Return what comes next; the place is left to others when nothing does."""
        try:
            async with asyncio.timeout(self._silence_s):
                while True:
                    try:
                        async with place.listening():
                            return await request.receive()
                    except WantedError:
                        await self._leave(form, place, now=True)
        except TimeoutError:
            text = f"nothing of the body came for {self._silence_s:g} s"
            raise Problem(408, text, "", "request_timeout", CLOSE) from None

    async def _leave(self, form: Form, place: Place, now: bool = False) -> None:
        """Leave the place to others where next to nothing is in memory; `now` also if a part is on its way.

        Raises Problem if it is to be left now, and too much is in memory.
        """
        is_sending = self._sending is not None and not self._sending.done()
        if len(form.content) <= HELD_BYTES and (now or place.is_wanted or not is_sending):
            await self._sent()
            place.give()
        elif now:
            retry = {**CLOSE, "retry-after": str(RETRY_AFTER_S)}
            raise Problem(503, "others wait to upload, and too little of this came", "", "overloaded", retry)

    async def _take(self, form: Form, place: Place | None) -> None:
        """Send what fills a part, and leave the place to others for the next; without one, send everything."""
        if self.bytes + len(form.content) > self._most_bytes:
            raise self._too_large()
        if form.filename is not None and not self._begun:
            await self._shelf.begin(self.file_id)
            self._begun = True
        while len(form.content) >= (PART_BYTES if place else 1):
            await self._send_part(form)
            if place and place.is_wanted:
                await self._sent()
                place.give()
                if len(form.content) > HELD_BYTES:
                    await place.take()

    async def _send_part(self, form: Form) -> None:
        part = bytes(memoryview(form.content)[:PART_BYTES])
        del form.content[:PART_BYTES]
        await self._sent()
        self._sending = asyncio.create_task(self._shelf.append(self.file_id, self.bytes, part))
        self.bytes += len(part)

    async def _sent(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending

    async def _drop(self) -> None:
        """Leave nothing behind; what cannot be deleted now the queue sweeps when it has been left for an hour."""
        with suppress(PenstockError):
            await self._sent()
        with suppress(PenstockError):
            if self._begun:
                await self._shelf.delete(self.file_id)

    def _too_large(self) -> Problem:
        text = f"the file is larger than {self._most_bytes} bytes"
        return Problem(413, text, "file", "file_too_large", CLOSE)


def described(form: Form) -> pb.CloseFileRequest:
    """Return what the form's fields say of its file; raises Problem naming the first wrong one."""
    for name in form.fields:
        if name not in KNOWN_FIELDS:
            raise Problem(400, f"{name[:80]}: there is no such field", name[:80], "unknown_parameter")
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise Problem(400, "purpose: is missing", "purpose", "missing_parameter")
    if purpose != PURPOSE:
        code = "unsupported_parameter" if purpose in OTHER_PURPOSES else "invalid_value"
        raise Problem(400, f"purpose: only {PURPOSE!r} is supported, got {purpose[:80]!r}", "purpose", code)
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    given: dict[str, object] = {}
    if anchor is not None or seconds is not None:
        number = int(seconds) if seconds is not None and seconds.isdecimal() and len(seconds) < 12 else seconds
        given = {"anchor": anchor, "seconds": number}
    filename = (form.filename or "").encode()[:MAX_FILENAME_BYTES].decode(errors="ignore")
    expires_after_ns = read_expiry("expires_after", given or None) * 1_000_000_000
    return pb.CloseFileRequest(filename=filename, purpose=purpose, expires_after_ns=expires_after_ns)
