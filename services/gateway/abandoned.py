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
from collections import Counter
from collections.abc import Sequence
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
        self._pushed_out = -1 if keeps_oldest else 0
        self._left: dict[str, Acting] = {}
        """By name, the oldest first: whose they are."""
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def add(self, name: str) -> None:
        """Have a request, or those of a group, cancelled in the name of who is acted for now.

        It is named by its id, or by a drawn key. Of too many one goes on, of who has the most.
        """
        self._left[name] = acting()
        if len(self._left) > self._most:
            ((most, _),) = Counter(self._left.values()).most_common(1)
            names = [one for one, whose in self._left.items() if whose == most]
            self._let_go([names[self._pushed_out]], f"{self._most} without one wait for the queue")
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
        self._let_go(list(self._left), "the queue has not answered")

    async def _cancel_all(self) -> None:
        while self._left:
            names, whose = self._next()
            try:
                with acting_as(whose):
                    count = await self._cancelled(names)
            except Unavailable as error:
                if self._stopping.is_set():
                    self._let_go(list(self._left), error)
                else:
                    await self._pause()
            except PenstockError as error:
                self._let_go(names, error)
            else:
                self._metrics.cancels.inc(count)
                for name in names:
                    self._left.pop(name, None)

    def _next(self) -> tuple[list[str], Acting]:
        """Return the oldest, with all others of who may cancel it, and who that is; what is no id comes by itself."""
        first, whose = next(iter(self._left.items()))
        if not _is_id(first):
            return [first], whose
        return [name for name, others in self._left.items() if others == whose and _is_id(name)], whose

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

    def _let_go(self, names: Sequence[str], reason: object) -> None:
        for name in names:
            if self._left.pop(name, None) is not None:
                self._metrics.uncancelled.inc()
                log.warning("%s goes on without its client: %s", name, reason, extra=about(name))


def _is_id(name: str) -> bool:
    """Return whether it is the id of one request."""
    return Group.named(name) is None and not DRAWN.fullmatch(name)
