"""Who watches what. Results are read from the store after a cursor; only token deltas are pushed.

A watcher is told that something ended, and reads it from the store itself (a small result
that it named is handed to it), so a slow watcher holds back nobody. Token deltas are merged per completion until the
watcher takes them, and past MAX_BEHIND_BYTES they are left out: what is kept for one watcher is bounded, whatever it
watches and however slowly it reads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.request.v1 import request_pb2
from services.queue.wire import StoredResult

MAX_BEHIND_BYTES = 4 * 1024 * 1024
"""Of deltas, as they lie in memory, and of results handed over, that a watcher has not taken: four frames. A reader at
any speed a person or a log can follow is never that far behind; one that is gets the rest of a text with its result."""

PENDING_BYTES = 1024
"""What a delta that waits takes besides its content: a message with an arena of its own, its key and its entry."""

PIECE_BYTES = 256
"""What a delta that is merged into a waiting one takes besides its content: entries of lists and their objects."""


@dataclass(slots=True)
class _Position:
    """How much of one completion a watcher has been given."""

    attempt: int
    tokens: int = 0
    characters: int = 0


@dataclass(slots=True)
class _Pending:
    """Deltas of one completion that wait to be taken; joined only then, because a message keeps every text it had."""

    first: request_pb2.TokenDelta
    more: list[tuple[str, list[int], list[request_pb2.TokenLogprob], list[request_pb2.ToolPart]]]

    def merged(self) -> request_pb2.TokenDelta:
        """Return all of it as one delta."""
        if self.more:
            self.first.text += "".join(text for text, _, _, _ in self.more)
            for _, token_ids, logprobs, parts in self.more:
                self.first.token_ids.extend(token_ids)
                self.first.logprobs.extend(logprobs)
                self.first.parts.extend(parts)
        return self.first


class Watcher:
    """One open Watch stream."""

    def __init__(self, tokens: bool) -> None:
        """Watch results, and token deltas if `tokens`."""
        self.tokens = tokens
        self.ended: dict[int, StoredResult | None] = {}
        """Requests that ended and were not taken yet, with their result or None to be read from the store (streams by
        name only)."""
        self.started_over = False
        """Whether the queue has been rebuilt from its store: what ended meanwhile was told to nobody."""
        self._told_bytes = 0
        self._behind_bytes = 0
        self._news = asyncio.Event()
        self._deltas: dict[tuple[str, int], _Pending] = {}
        self._positions: dict[tuple[str, int], _Position] = {}

    def clear(self) -> None:
        """Forget that there is news; call before looking for it, so that none is missed."""
        self._news.clear()

    def notify(self) -> None:
        """Say that there is news."""
        self._news.set()

    async def wait(self) -> None:
        """Wait for news."""
        await self._news.wait()

    def take_deltas(self) -> list[request_pb2.TokenDelta]:
        """Return the merged deltas that are ready."""
        deltas = [pending.merged() for pending in self._deltas.values()]
        self._deltas.clear()
        self._behind_bytes = 0
        return deltas

    def end(self, seq: int, result: StoredResult | None) -> None:
        """Note that a request has ended, with its result if it is at hand and not too much is kept already."""
        size_bytes = 0 if result is None else len(result.body)
        if self._told_bytes + size_bytes > MAX_BEHIND_BYTES:
            result, size_bytes = None, 0
        self._told_bytes += size_bytes
        self.ended[seq] = result

    def take_ended(self) -> dict[int, StoredResult | None]:
        """Return the requests that ended and were not taken yet."""
        ended, self.ended = self.ended, {}
        self._told_bytes = 0
        return ended

    def forget(self, request_id: str, choices: int) -> None:
        """Forget how far the completions of an ended request were."""
        for index in range(choices):
            self._positions.pop((request_id, index), None)

    def add(self, delta: request_pb2.TokenDelta) -> None:
        """Merge one delta; what the watcher has already is cut off, what leaves a gap waits for the whole.

        Past MAX_BEHIND_BYTES it is dropped, as if the watcher had come late: those after it leave a gap then.
        """
        key = (delta.request_id, delta.index)
        size_bytes = delta.ByteSize() + (PIECE_BYTES if key in self._deltas else PENDING_BYTES)
        if self._behind_bytes + size_bytes > MAX_BEHIND_BYTES:
            return
        position = self._positions.get(key)
        if position is None or position.attempt < delta.attempt:
            position = self._positions[key] = _Position(delta.attempt)
            self._deltas.pop(key, None)
        if delta.attempt < position.attempt or not _cut(delta, position):
            return
        self._behind_bytes += size_bytes
        position.tokens += len(delta.token_ids)
        position.characters += len(delta.text)
        pending = self._deltas.get(key)
        if pending is None:
            self._deltas[key] = _Pending(delta, [])
        else:
            pending.more.append((delta.text, list(delta.token_ids), list(delta.logprobs), list(delta.parts)))
        self._news.set()


def _cut(delta: request_pb2.TokenDelta, position: _Position) -> bool:
    """Cut what was seen off `delta`; return whether anything new is left that joins without a gap."""
    if delta.offset == position.tokens:
        return bool(delta.token_ids or delta.text)
    if delta.offset != 0:
        # A gap: this watcher came late. The worker was told to send everything from the start.
        return False
    seen = position.tokens
    del delta.token_ids[:seen]
    del delta.logprobs[:seen]
    delta.text = delta.text[position.characters :]
    delta.offset = seen
    return bool(delta.token_ids or delta.text)


class WatchHub:
    """All watchers, by what they watch, and the durable progress of each batch."""

    def __init__(self) -> None:
        """Make a hub nobody watches."""
        self._by_batch: defaultdict[str, set[Watcher]] = defaultdict(set)
        self._by_seq: defaultdict[int, set[Watcher]] = defaultdict(set)
        self._progress: dict[str, tuple[int, int]] = {}
        self._watchers: set[Watcher] = set()

    def __len__(self) -> int:
        """Return the number of watchers."""
        return len(self._watchers)

    @contextmanager
    def batch(self, batch: str, tokens: bool) -> Iterator[Watcher]:
        """Register a watcher of every request of a batch."""
        watcher = Watcher(tokens)
        self._watchers.add(watcher)
        self._by_batch[batch].add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            _discard(self._by_batch, batch, watcher)

    @contextmanager
    def requests(self, seqs: Iterable[int], tokens: bool) -> Iterator[Watcher]:
        """Register a watcher of these requests."""
        watcher = Watcher(tokens)
        self._watchers.add(watcher)
        named = set(seqs)
        for seq in named:
            self._by_seq[seq].add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            for seq in named:
                _discard(self._by_seq, seq, watcher)

    def progress(self, batch: str) -> tuple[int, int]:
        """Return the durable (waiting, running) of a batch."""
        return self._progress.get(batch, (0, 0))

    def update(self, progress: dict[str, tuple[int, int]]) -> None:
        """Take the durable counts of batches that changed."""
        for batch, counts in progress.items():
            if any(counts):
                self._progress[batch] = counts
            else:
                self._progress.pop(batch, None)
            for watcher in self._by_batch.get(batch, ()):
                watcher.notify()

    def reset(self, progress: dict[str, tuple[int, int]]) -> None:
        """Start over from what the store holds, and wake everyone."""
        self._progress = {batch: counts for batch, counts in progress.items() if any(counts)}
        for watcher in self._watchers:
            watcher.started_over = True
            watcher.notify()

    def ended(
        self, seq: int, batch: str, request_id: str, choices: int, result: Callable[[], StoredResult | None]
    ) -> None:
        """Tell the watchers that a request has a durable result; those that named it get it from `result`."""
        for watcher in self._by_seq.get(seq, ()):
            watcher.end(seq, result())
            watcher.forget(request_id, choices)
            watcher.notify()
        for watcher in self._by_batch.get(batch, ()):
            watcher.forget(request_id, choices)
            watcher.notify()

    def publish(self, seq: int, batch: str, delta: request_pb2.TokenDelta) -> int:
        """Give a token delta to those who want it; return how many did."""
        wanting = [w for w in self._by_seq.get(seq, ()) if w.tokens]
        wanting += [w for w in self._by_batch.get(batch, ()) if w.tokens]
        for watcher in wanting:
            copy = request_pb2.TokenDelta()
            copy.CopyFrom(delta)
            watcher.add(copy)
        return len(wanting)


def _discard(
    registry: defaultdict[str, set[Watcher]] | defaultdict[int, set[Watcher]], key: object, w: Watcher
) -> None:
    watchers = registry[key]  # type: ignore[index]  # the caller's key is of the registry's kind
    watchers.discard(w)
    if not watchers:
        del registry[key]  # type: ignore[arg-type]
