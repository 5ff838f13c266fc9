"""What is in memory of files that are being sent: as many pages as there is room for, whatever their clients take.

A page can be read again. So one that its client does not take is let go when others wait for room, and read on from
where it stood once the client takes more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Generic, Self, TypeVar

from services.gateway.limits import MAX_PAGES, PAGE_SLACK_S
from services.gateway.room import Place, Room
from services.gateway.shelf import Shelf

PIECE_BYTES = 64 * 1024
"""Of a file, told at once."""

T = TypeVar("T")


class Pages(Room):
    """The pages of all downloads of a gateway."""

    def __init__(self, most: int = MAX_PAGES, slack_s: float = PAGE_SLACK_S) -> None:
        """Have `most` of them in memory. A client has `slack_s` to take a piece of one that others wait for."""
        super().__init__(most, 0.0, slack_s)


class Page(Place, Generic[T]):
    """What was read for a download, and has not been told yet; to have as a context, and to take inside."""

    def __init__(self, pages: Pages, tenant: str) -> None:
        """Hold nothing of a tenant's yet."""
        super().__init__(pages, tenant)
        self._rest: list[T] = []
        """The next one last."""

    def __enter__(self) -> Self:
        """Have it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go what there is."""
        self.end()

    @property
    def is_had(self) -> bool:
        """Whether it was not let go."""
        return self._is_had

    def fill(self, some: list[T]) -> None:
        """Hold these."""
        self._rest = some[::-1]

    def told(self) -> Iterator[T]:
        """Have one after the other, until there is none more or the rest was let go."""
        now_s = asyncio.get_running_loop().time
        while self._rest:
            one = self._rest.pop()
            self.due_s = now_s() + self._left_s
            with self._room.listening(self):
                yield one

    def end(self) -> None:
        """Let go what there is."""
        self._rest = []
        self.give()


async def content_of(shelf: Shelf, pages: Pages, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a tenant's file, piece by piece."""
    offset = 0
    with Page[bytes](pages, tenant) as page:
        while True:
            await page.take()
            async with aclosing(shelf.content(file_id, offset)) as parts:
                part = await anext(parts, b"")
            if not part:
                return
            page.fill([part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)])
            del part
            for piece in page.told():
                offset += len(piece)
                yield piece
            page.give()
