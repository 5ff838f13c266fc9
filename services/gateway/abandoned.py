"""Requests whose clients have gone, until the queue has cancelled them.

Patience is for somebody who waits, and nobody waits for this: it is tried until the queue answers or the gateway stops.
While the queue is away streams stand still, which is when most clients give up.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress

from penstock.client import Client
from penstock.credentials import Acting, acting, acting_as
from penstock.errors import NotFound, PenstockError, Unavailable
from penstock.queue.v1 import queue_pb2
from services.gateway.group import Group
from services.gateway.limits import MAX_ABANDONED
from services.gateway.metrics import GatewayMetrics
from services.logs import about

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between two tries, each of which has the client's patience."""

DRAWN = re.compile(r"gateway-[0-9a-f]{32}")


def drawn_key() -> str:
    """Return an idempotency key for a request without one: it names the request also where its id has been lost."""
    return f"gateway-{secrets.token_hex(16)}"


class Abandoned:
    """Cancels them, all that one key may cancel at once."""

    def __init__(
        self, client: Client, metrics: GatewayMetrics, most: int = MAX_ABANDONED, keeps_oldest: bool = False
    ) -> None:
        """Cancel through `client`. Of more than `most` some go on: the oldest, or with `keeps_oldest` the newest."""
        self._client = client
        self._metrics = metrics
        self._most = most
        self._keeps_oldest = keeps_oldest
        self._left: dict[Acting, dict[str, None]] = {}
        """The names by whose they are, who is next first, and of each the oldest first."""
        self._pushed_out = 0
        """How many have been too many since there was last nothing left."""
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def add(self, name: str) -> None:
        """Have a request, or those of a group, cancelled in the name of who is acted for now.

        It is named by its id, or by a drawn key. Of too many one goes on, of who has the most.
        """
        self._left.setdefault(acting(), {})[name] = None
        if sum(map(len, self._left.values())) > self._most:
            self._push_out()
        if self._task is None or self._task.done():
            # In a context of its own: the caller's has its key, which is to go with the last name that needs it.
            self._task = asyncio.create_task(self._cancel_all(), name="abandoned", context=contextvars.Context())

    async def settle(self) -> None:
        """Wait until all are cancelled, or as long as the client is patient; what is left then goes on."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def give_up(self) -> None:
        """Let what is left go on."""
        if self._task is not None:
            self._task.cancel()
        self._let_all_go("the queue has not answered")

    def _push_out(self) -> None:
        """Let one go on, of who has the most. While the queue is away that may be many a second: no line for each."""
        most, names = max(self._left.items(), key=lambda item: len(item[1]))
        name = next(reversed(names) if self._keeps_oldest else iter(names))
        self._forget(most, [name])
        self._metrics.uncancelled.inc()
        if not self._pushed_out:
            text = "%s goes on without its client, and more may: %d without one wait for the queue"
            log.warning(text, name, self._most, extra=about(name))
        self._pushed_out += 1

    async def _cancel_all(self) -> None:
        try:
            while self._left:
                await self._cancel_next()
        finally:
            if self._pushed_out:
                text = "%d requests went on without their clients: more than %d were to be cancelled at once"
                log.warning(text, self._pushed_out, self._most)
                self._pushed_out = 0

    async def _cancel_next(self) -> None:
        names, whose = self._next()
        try:
            with acting_as(whose):
                count = await self._cancelled(names)
        except Unavailable as error:
            if self._stopping.is_set():
                self._let_all_go(error)
            else:
                await self._pause()
        except PenstockError as error:
            self._let_go(whose, names, error)
        else:
            self._metrics.cancels.inc(count)
            self._forget(whose, names)

    def _next(self) -> tuple[list[str], Acting]:
        """Return the oldest of who is next, with all others of theirs, and who that is; what is no id comes alone."""
        whose = next(iter(self._left))
        names = self._left[whose] = self._left.pop(whose)  # it is everybody else's turn before
        first = next(iter(names))
        return [name for name in names if _is_id(name)] if _is_id(first) else [first], whose

    async def _cancelled(self, names: Sequence[str]) -> int:
        """Cancel them and return how many had not ended by themselves."""
        group = Group.named(names[0])
        if DRAWN.fullmatch(names[0]):
            key = queue_pb2.IdempotencyKey(key=names[0])
            try:
                names = [await self._id_of(queue_pb2.GetRequest(idempotency_key=key))]
            except NotFound:
                return 0  # it never came to the queue
        if group is None:
            done = await self._client.cancel(*names)
            return len(names) - len(done.not_cancelled)
        done = await self._client.cancel(batch=group.batch)
        return min(done.cancelled + done.aborting, 1)

    async def _id_of(self, request: queue_pb2.GetRequest) -> str:
        """Return the id of what `request` names by its key; raises NotFound if there is none, stored or under way."""
        try:
            return (await self._client.wire_get(request)).request_id
        except NotFound:
            # A submit may still wait there to be stored. Counts are answered behind the commit under way, and in the
            # next one, with what waited before they were asked for.
            await self._client.stats()
            return (await self._client.wire_get(request)).request_id

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self._stopping.wait()

    def _let_all_go(self, reason: object) -> None:
        for whose, names in list(self._left.items()):
            self._let_go(whose, list(names), reason)

    def _let_go(self, whose: Acting, names: Iterable[str], reason: object) -> None:
        for name in self._forget(whose, names):
            self._metrics.uncancelled.inc()
            log.warning("%s goes on without its client: %s", name, reason, extra=about(name))

    def _forget(self, whose: Acting, names: Iterable[str]) -> list[str]:
        """Return those of the names that were still left: some may have been pushed out meanwhile."""
        left = self._left.get(whose, {})
        gone = [name for name in names if name in left]
        for name in gone:
            del left[name]
        if not left:
            self._left.pop(whose, None)
        return gone


def _is_id(name: str) -> bool:
    """Return whether it is the id of one request."""
    return Group.named(name) is None and not DRAWN.fullmatch(name)
