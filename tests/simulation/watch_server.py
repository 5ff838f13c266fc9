"""The queue's half of a Watch stream: durable results after a cursor, handed over and read as production does it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from services.queue.core.entry import DEFAULT_TENANT, BatchKey
from services.queue.core.messages import WatchTokens
from services.queue.storage import store
from services.queue.storage.reader import Page
from services.queue.storage.store import StoreError
from services.queue.watch.batch_log import BatchLog
from services.queue.wire import StoredResult
from tests.simulation.network import Stream
from tests.simulation.world import MS

if TYPE_CHECKING:
    from tests.simulation.queue_actor import QueueActor

PAGE_RESULTS = 3
"""Small, so that every watch takes several."""

KEPT_BYTES = 1_500
"""Of results for one watcher: so few that some have to be read after all."""

READ_NS = 2 * MS


class Pages:
    """Reads the queue's store without another thread, of which the simulation has none."""

    def __init__(self, queue: QueueActor) -> None:
        """Read what `queue` reads."""
        self._queue = queue

    async def page(self, batch: BatchKey, cursor: int, _limit: int) -> Page:
        """Return results of a batch after `cursor`; raises StoreError."""
        return store.durably(self._queue.store, partial(self._queue.reader._page, batch, cursor, PAGE_RESULTS))


class WatchServer:
    """One watch: sends what there is, waits until it is taken, goes on; sleeps when nothing is after its cursor."""

    def __init__(self, queue: QueueActor, number: int, stream: Stream, batch: str, cursor: int, tokens: bool) -> None:
        """Watch `batch` after `cursor`, token deltas too if `tokens`."""
        self.stream = stream
        self.batch = batch
        self._queue = queue
        self._number = number
        self._open = ExitStack()
        watcher = self._open.enter_context(queue.hub.batch((DEFAULT_TENANT, batch), tokens, KEPT_BYTES))
        self._log = BatchLog(Pages(queue), watcher, (DEFAULT_TENANT, batch), cursor)  # type: ignore[arg-type]
        self._interest = WatchTokens(True, number, None, (DEFAULT_TENANT, batch)) if tokens else None
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
        self._open.close()
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
            results = self._look()
        except StoreError:
            self._queue.end_watch(self._number)
            return
        self._busy = bool(results)
        self._news = self._news or not self._log.at_end
        if results:
            self.stream.down([(result.cursor, result.result()) for result in results])
        self._read()

    def _look(self) -> list[StoredResult]:
        """Return what the log has; it waits for nothing, as pages are read at once."""
        reading = self._log.read()
        try:
            reading.send(None)
        except StopIteration as end:
            return list(end.value)
        raise RuntimeError("the log waits for something")
