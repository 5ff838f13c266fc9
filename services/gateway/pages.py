"""What is in memory of files, lists and large answers that are sent: as there is room for, whatever their clients take.

A page can be read again. So one that its client does not take is let go when others wait for room, and read on from
where it stood once the client takes more: be that in the midst of a line, which is made again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Generic, NamedTuple, Self, TypeVar

from penstock.errors import ServiceError
from penstock.limits import PART_BYTES
from services.gateway.limits import (
    LOOK_WAIT_S,
    MAX_COUNTING,
    MAX_LOOKING,
    MAX_PAGES_BYTES,
    MAX_READING,
    PAGE_SLACK_S,
    RETRY_AFTER_S,
)
from services.gateway.places import Place, Places
from services.gateway.problem import Problem
from services.gateway.reply import Writing
from services.gateway.shelf import Shelf

PIECE_BYTES = 64 * 1024
"""Of a file, told at once."""

PLACE_BYTES = 1024 * 1024
"""Of a page: what one place stands for."""

T = TypeVar("T")


class HalfToldError(ServiceError):
    """What was half told cannot be told to its end: it was deleted, or has ended anew."""


class Sheet(NamedTuple, Generic[T]):
    """What is read for one page."""

    items: list[tuple[int, T]]
    """Each with where what is behind it is read from."""
    behind: int
    """Where what is behind all of it is read from."""
    size_bytes: int
    """In memory, while it is told."""
    last: bool
    """Whether there is nothing behind it."""


class Glances(Places):
    """Looks at what is not held: it is small, or is let go. Tenants have turns."""

    def __init__(self, most: int, what: str) -> None:
        """Have `most` at once of what a client is told there is too much of."""
        super().__init__(most)
        self._what = what

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Have one of them inside. Raises Problem if it takes long to come to that."""
        async with self.place(tenant) as place:
            try:
                async with asyncio.timeout(LOOK_WAIT_S):
                    await place.take()
            except TimeoutError:
                retry = {"retry-after": str(RETRY_AFTER_S)}
                raise Problem(503, f"too many {self._what}", "", "overloaded", retry) from None
            yield


class Pages(Places):
    """The pages of all downloads, lists and large answers of a gateway."""

    def __init__(self, most: int = MAX_PAGES_BYTES // PLACE_BYTES, slack_s: float = PAGE_SLACK_S) -> None:
        """Have places for `most` MiB of them. A client has `slack_s` to take a piece of one that others wait for."""
        super().__init__(most, 0.0, slack_s)
        self.reading = Places(MAX_READING)
        """For a page that is had a place of, while it is read."""
        self.looking = Glances(MAX_LOOKING, "requests are being looked up")
        self.counting = Glances(MAX_COUNTING, "batches that have ended are being counted again")
        self.writing = Writing()


class Paged(Place, Generic[T]):
    """What a download, a list or a large answer tells, of which a page at a time is held; to have as a context."""

    def __init__(
        self, pages: Pages, tenant: str, read: Callable[[int], Awaitable[Sheet[T]]], expected_bytes: int
    ) -> None:
        """Hold nothing of a tenant's yet. `read` begins at 0, and finds `expected_bytes` in most cases."""
        super().__init__(pages, tenant)
        self._pages = pages
        self._read = read
        self._least = self._expected = _places(expected_bytes)
        self._rest: list[tuple[int, T]] = []
        """The next one last."""
        self._one: T | None = None
        self._line = b""
        """The present one's."""
        self.line_bytes = 0
        """Of it, once a piece is told."""
        self._mark = b""
        """By which a line that was let go is known again."""
        self._at = self._next = self._behind = 0
        """Where the present one is read from, the next one, and what is behind the page."""
        self._last = False

    def __enter__(self) -> Self:
        """Have it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go what there is."""
        self._drop()

    @property
    def one(self) -> T:
        """The present one, until pieces of it are told."""
        assert self._one is not None, "it is there when it is one's turn"
        return self._one

    def replace(self, one: T) -> None:
        """Have another for the present one, until it is let go: what is read again is what it was read as."""
        self._one = one

    async def turn(self) -> bool:
        """Come to the next one; return whether there is one."""
        while not self._rest:
            self.give()
            if self._last:
                return False
            await self._fill()
        self._pop()
        return True

    async def pieces(self, make: Callable[[T], Iterable[bytes]], size_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield what `make` makes of the present one, whose size it is that says how long that takes, piece by piece.

        Raises HalfToldError if it was let go meanwhile and is another when it is read again.
        """
        await self._write(make, size_bytes)
        told_bytes, self.line_bytes = 0, len(self._line)
        now_s = asyncio.get_running_loop().time
        while told_bytes < self.line_bytes:
            if not self._had:
                await self._write_again(make, size_bytes)
            piece = self._line[told_bytes : told_bytes + PIECE_BYTES]
            told_bytes += len(piece)
            self.due_s = now_s() + self._left_s
            with self._pages.listening(self):
                yield piece
        self._one, self._line = None, b""

    def give(self) -> None:
        """Let go what there is of the page: who waits for the next one holds nothing that is not counted."""
        self._rest, self._one, self._line = [], None, b""
        super().give()

    def end(self) -> None:
        """Let go what there is, but for the mark of a line that is being told."""
        self._mark = _mark(self._line)
        self._drop()

    def _drop(self) -> None:
        self.give()
        self._last = False

    async def _write(self, make: Callable[[T], Iterable[bytes]], size_bytes: int) -> None:
        one = self.one
        self._line = await self._pages.writing.of(lambda: make(one), size_bytes)

    async def _write_again(self, make: Callable[[T], Iterable[bytes]], size_bytes: int) -> None:
        self._next = self._at
        if await self.turn():
            await self._write(make, size_bytes)
        if _mark(self._line) != self._mark:
            raise HalfToldError("what was being sent has been deleted or has ended anew: ask for the file again")

    async def _fill(self) -> None:
        """Read a page; if it takes more than was expected, again when there is room for it."""
        while True:
            await self.take(self._expected)
            async with self._pages.reading.place(self.tenant) as reading:
                await reading.take()
                sheet = await self._read(self._next)
            places = min(_places(sheet.size_bytes), self._pages.most)
            if places <= self._had:
                break
            del sheet
            self.give()
            self._expected = places
        self.keep(places)
        self._expected = max(self._least, places)
        self._rest, self._behind, self._last = sheet.items[::-1], sheet.behind, sheet.last
        if not self._rest:
            self._next = self._behind

    def _pop(self) -> None:
        self._at = self._next
        behind, self._one = self._rest.pop()
        self._next = behind if self._rest else self._behind


def _places(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PLACE_BYTES))


def _mark(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


async def content_of(shelf: Shelf, pages: Pages, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a tenant's file, piece by piece."""

    async def read(offset: int) -> Sheet[bytes]:
        async with aclosing(shelf.content(file_id, offset)) as parts:
            part = await anext(parts, b"")
        pieces = [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
        items = [(offset + at * PIECE_BYTES + len(piece), piece) for at, piece in enumerate(pieces)]
        return Sheet(items, offset + len(part), len(part), last=not part)

    with Paged(pages, tenant, read, PART_BYTES) as page:
        while await page.turn():
            async with aclosing(page.pieces(lambda piece: (piece,))) as pieces:
                async for piece in pieces:
                    yield piece
