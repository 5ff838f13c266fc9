"""What watchers and followers are told, encoded: events in frames of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from penstock.limits import TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2
from services.queue.storage.reader import Reader
from services.queue.watch.hub import Watcher
from services.queue.wire import StoredResult
from services.rpc.encoding import length_tag, wrapped

Told: TypeAlias = Callable[[Collection[int]], object]
"""Is called with the requests whose results are about to be told."""

FEW_RESULTS = 8
"""Results that are read at once whatever their size; more are put in order first and then read a few at a time."""

_EVENTS = length_tag(queue_pb2.WatchResponse, "events")
_TOKENS = length_tag(queue_pb2.WatchEvent, "tokens")

if length_tag(queue_pb2.FollowResponse, "events") != _EVENTS:
    raise TypeError("the frames of Watch and of Follow must be alike")


class Results:
    """Results as frames, from the store where they are not at hand."""

    def __init__(self, reader: Reader) -> None:
        """Read with `reader`."""
        self._reader = reader

    async def ended(self, ended: Mapping[int, StoredResult | None], told: Told) -> AsyncIterator[bytes]:
        """Yield frames of the results of requests that have just ended; those that are None are read.

        `told` is called before a result is yielded, and never of what has none.
        """
        unread = [seq for seq, result in ended.items() if result is None]
        if len(unread) > FEW_RESULTS:
            async for frame in self.stored(await self._reader.in_order(list(ended)), told):
                yield frame
            return
        results = {seq: result for seq, result in ended.items() if result is not None}
        if unread:
            results |= await self._reader.results(unread)
        told(results.keys())
        for frame in frames(result_events(results.values())):
            yield frame

    async def stored(self, seqs: Sequence[int], told: Told) -> AsyncIterator[bytes]:
        """Yield frames of the results of these requests, read a few at a time however many there are; see `ended`."""
        async for found in self._reader.in_chunks(seqs):
            told(found.keys())
            results = list(found.values())
            found.clear()
            for frame in frames(events_in_turn(results)):
                yield frame


def delta_events(watcher: Watcher) -> list[bytes]:
    """Return the token deltas that wait for `watcher`, encoded."""
    return [wrapped(_TOKENS, delta.SerializeToString()) for delta in watcher.take_deltas()]


def result_events(results: Iterable[StoredResult]) -> list[bytes]:
    """Return results in order of completion, encoded."""
    return [result.event() for result in sorted(results, key=_by_cursor)]


def events_in_turn(results: list[StoredResult]) -> Iterator[bytes]:
    """Take results out of a list, and yield each, encoded, in its turn: what was sent is not kept besides."""
    results.reverse()
    while results:
        yield results.pop().event()


def frames(events: Iterable[bytes]) -> Iterator[bytes]:
    """Cut encoded events into encoded frames of bounded size."""
    frame: list[bytes] = []
    size_bytes = 0
    for event in events:
        frame.append(wrapped(_EVENTS, event))
        size_bytes += len(event)
        if size_bytes >= TARGET_FRAME_BYTES:
            # Whoever takes a frame may take its time: its parts are not kept besides.
            whole = b"".join(frame)
            frame, size_bytes = [], 0
            del event
            yield whole
    if frame:
        whole = b"".join(frame)
        frame.clear()
        yield whole


def _by_cursor(result: StoredResult) -> int:
    return result.cursor
