"""Looks requests up, those of one body with several prompts as one: for their state, and for what answers them.

A large answer is had twice. What it takes is known only once it has come; it is let go of then, and read again when
there is room to hold it, for however long its client takes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

from penstock.client import Client
from penstock.connection import Turn
from penstock.errors import NotFound
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from services.gateway.group import Group, check_answers
from services.gateway.limits import TELLING
from services.gateway.pages import PLACE_BYTES, Paged, Pages, Sheet

Each: TypeAlias = list[queue_pb2.GetResponse]
"""A request, or each of those that one body with several prompts became."""

LOOK_AHEAD = 16
"""Requests of one body looked up at once, and only after smaller answers than of which so many are a page."""


class Found(NamedTuple):
    """A request, or each of those that one body with several prompts became."""

    each: Each
    size_bytes: int
    """Of what they were answered, whether or not it was kept."""


class Lookup:
    """Reads requests by what their clients know them by."""

    def __init__(self, client: Client, pages: Pages) -> None:
        """Ask the queue through `client`; large answers are held among `pages`."""
        self._client = client
        self._pages = pages

    def page(self, name: str, tenant: str, size_bytes: int) -> Paged[Each]:
        """Return what has the state of a request, with results of about this size."""

        async def read(_first: int) -> Sheet[Each]:
            found = await self.found(name, math.inf)
            return Sheet([(1, found.each)], 1, TELLING * found.size_bytes, last=True)

        return Paged(self._pages, tenant, read, TELLING * size_bytes)

    async def look(self, name: str, tenant: str, most_bytes: float) -> Found:
        """Return what `found` does, in turns of the tenant: only after one is it known how large an answer is."""
        return await self.found(name, most_bytes, partial(self._pages.looking.turn, tenant))

    async def found(self, name: str, most_bytes: float, turn: Turn = nullcontext) -> Found:
        """Return a request, or each of those that one body with several prompts became, each asked for in a `turn`.

        Of answers that are `most_bytes` or more together only the size is kept. Raises Problem, where they are kept, if
        they are more than one answer can be.
        """
        group = Group.named(name)
        if group is None:
            one = await self._client.wire_get(queue_pb2.GetRequest(request_id=name), turn)
            return _kept(Found([one], one.result.ByteSize()), most_bytes)
        found = Found([], 0)
        at_once = largest_bytes = 1
        while (first := len(found.each)) < group.count:
            at_once = max(1, min(at_once, PLACE_BYTES // largest_bytes))
            try:
                numbers = range(first, min(first + at_once, group.count))
                some = await asyncio.gather(*(self._prompt(group, number, turn) for number in numbers))
            except NotFound:
                raise NotFound(f"request_id: {name!r} is unknown") from None
            sizes_bytes = [one.result.ByteSize() for one in some]
            found = _kept(Found([*found.each, *some], found.size_bytes + sum(sizes_bytes)), most_bytes)
            if most_bytes:
                check_answers(found.size_bytes, group.count)
            largest_bytes = max(largest_bytes, *sizes_bytes)
            at_once = min(2 * at_once, LOOK_AHEAD)
        return found

    async def _prompt(self, group: Group, number: int, turn: Turn) -> queue_pb2.GetResponse:
        """Return the request of one of several prompts."""
        key = queue_pb2.IdempotencyKey(key=group.key(number))
        return await self._client.wire_get(queue_pb2.GetRequest(idempotency_key=key), turn)


async def pieces_of(
    page: Paged[Each], make: Callable[[Each], Iterable[bytes]], size_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield what `make` makes of what `page` has, of this size, piece by piece."""
    with page:
        await page.turn()
        async with aclosing(page.pieces(make, size_bytes)) as pieces:
            async for piece in pieces:
                yield piece


def _kept(found: Found, most_bytes: float) -> Found:
    """Return it without the answers if they are `most_bytes` or more."""
    return found if found.size_bytes < most_bytes else found._replace(each=[_state_of(one) for one in found.each])


def _state_of(one: queue_pb2.GetResponse) -> queue_pb2.GetResponse:
    """Return a request's id, and whether it has a result."""
    result = pb.Result() if one.HasField("result") else None
    return queue_pb2.GetResponse(request_id=one.request_id, result=result)
