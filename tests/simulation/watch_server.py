"""The queue's half of a Watch stream: pages of durable results after a cursor, read as production reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.queue.core.entry import DEFAULT_TENANT
from services.queue.core.messages import WatchTokens
from services.queue.store import StoreError
from tests.simulation.network import Stream
from tests.simulation.world import MS

if TYPE_CHECKING:
    from tests.simulation.queue_actor import QueueActor

PAGE_RESULTS = 3
"""Small, so that every watch takes several."""

READ_NS = 2 * MS


class WatchServer:
    """One watch: reads a page, waits until it is taken, reads on; sleeps when there is nothing after its cursor."""

    def __init__(self, queue: QueueActor, number: int, stream: Stream, batch: str, cursor: int, tokens: bool) -> None:
        """Watch `batch` after `cursor`, token deltas too if `tokens`."""
        self.stream = stream
        self.batch = batch
        self._queue = queue
        self._number = number
        self._cursor = cursor
        self._interest = WatchTokens(True, None, (DEFAULT_TENANT, batch)) if tokens else None
        self._busy = False
        self._news = True
        self.renew()
        self._read()

    def renew(self) -> None:
        """Tell a machine that knows nothing of it whose tokens are watched."""
        if self._interest is not None:
            self._queue.committer.post(self._interest)

    def look(self) -> None:
        """Note that something ended."""
        self._news = True
        self._read()

    def taken(self) -> None:
        """Note that the client has taken the last page."""
        self._busy = False
        self._read()

    def ended(self) -> None:
        """Note that the stream is over."""
        if self._interest is not None:
            self._queue.committer.post(self._interest._replace(on=False))

    def _read(self) -> None:
        if self._news and not self._busy:
            self._news = False
            self._busy = True
            self._queue.timer(self._queue.world.draw_ns(READ_NS), self._page)

    def _page(self) -> None:
        if self._number not in self._queue.watches:
            return
        try:
            results, after = self._queue.reader._page((DEFAULT_TENANT, self.batch), self._cursor, PAGE_RESULTS)
        except StoreError:
            self._queue.end_watch(self._number)
            return
        self._busy = False
        if after != self._cursor:
            self._cursor = after
            self._news = True
            if results:
                self._busy = True
                self.stream.down([(result.cursor, result.result()) for result in results])
        self._read()
