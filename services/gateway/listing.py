"""A list as OpenAI's API has it, made while it is sent: no more of it is in memory than a page.

It is as long as was asked for. To end it early, with `has_more`, where it comes to many bytes would bound it as well;
but whoever names no limit, or the highest, means all there is, and mostly gets it. OpenAI's client turns pages, as does
who looks at `has_more`; a script that looks at `data` alone would take what came for all, and what it does for what it
does not find there, such as to upload it again, for right. That is worse than an answer that comes in pieces, which no
client tells from another: one that could not be told to its end breaks off, and is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from penstock.openai.jsontext import json_bytes
from services.gateway.download import Download
from services.gateway.pages import PLACE_BYTES, Paged, Pages, Sheet
from services.gateway.vigil import Vigil

BREATHE_EVERY = 16
"""Entries written before other requests get their turn: half a millisecond."""

T = TypeVar("T")


class Listing(Generic[T]):
    """What a list has, a page at a time; a page that was let go is read again from where it stood."""

    def __init__(
        self,
        ask: Callable[[str, int], Awaitable[tuple[list[T], bool]]],
        name_of: Callable[[T], str],
        size_of: Callable[[T], int],
        after: str,
        limit: int,
        at_once: int,
    ) -> None:
        """Have at most `limit` of what comes after the one named.

        `ask` returns, after a name, so many at most, which are `at_once` or fewer, and whether there are more.
        `size_of` says what one takes in memory, in bytes.
        """
        self._ask = ask
        self.name_of = name_of
        self._size_of = size_of
        self._limit = limit
        self._at_once = at_once
        self._names = {0: after}
        """The last name told, by how many were told with it: of the page that is being told."""
        self.has_more = False
        """Whether there are more than were read."""

    async def read(self, told: int) -> Sheet[T]:
        """Return a page of what follows when so many have been told."""
        most = min(self._at_once, self._limit - told)
        items: list[T] = []
        if most:  # else the last of them was let go while it was sent
            items, self.has_more = await self._ask(self._names[told], most)
        numbered = list(enumerate(items, told + 1))
        self._names = {told: self._names[told]} | {number: self.name_of(item) for number, item in numbered}
        behind = told + len(items)
        is_last = not (items and self.has_more) or behind == self._limit
        return Sheet(numbered, behind, sum(map(self._size_of, items)), is_last)


async def _as_it_is(item: T) -> T:
    return item


def sent(
    pages: Pages,
    tenant: str,
    vigil: Vigil,
    listing: Listing[T],
    shown: Callable[[T], dict[str, Any]],
    now: Callable[[T], Awaitable[T]] = _as_it_is,
) -> Download:
    """Return the answer with a list, of which a page is held among `pages`, for a tenant.

    Each entry is `shown` as it is `now`, which is asked when its turn comes. The rest of one that is let go while it is
    sent, and has changed by then, cannot be told: the answer breaks off.
    """
    page = Paged(pages, tenant, listing.read, PLACE_BYTES)
    return Download(_told(page, listing, shown, now), {"content-type": "application/json"}, vigil)


async def _told(
    page: Paged[T],
    listing: Listing[T],
    shown: Callable[[T], dict[str, Any]],
    now: Callable[[T], Awaitable[T]],
) -> AsyncGenerator[bytes, None]:
    first: str | None = None
    last: str | None = None
    count = 0
    yield b'{"object":"list","data":['
    with page:
        while await page.turn():
            page.replace(await now(page.one))
            last = listing.name_of(page.one)
            if first is None:
                first = last
            else:
                yield b","
            # As in a batch's lines, half of a character that takes two is told as JSON can.
            async with aclosing(page.pieces(lambda one: json_bytes(shown(one), "backslashreplace"))) as pieces:
                async for piece in pieces:
                    yield piece
            count += 1
            if count % BREATHE_EVERY == 0:
                await asyncio.sleep(0)
    end = {"first_id": first, "last_id": last, "has_more": listing.has_more}
    yield b"]," + b"".join(json_bytes(end))[1:]
