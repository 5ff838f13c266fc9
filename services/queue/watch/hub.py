"""Who watches what. Results are read from the store after a cursor; only token deltas are pushed.

A watcher is told that something ended, and reads it from the store itself, so a slow watcher holds back nobody. One
that keeps up is handed small results and reads nothing. Token deltas are merged per completion until the
watcher takes them, and past MAX_BEHIND_BYTES they are left out: what is kept for one watcher is bounded, whatever it
watches and however slowly it reads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from penstock.request.v1 import request_pb2
from services.queue.core.entry import BatchKey
from services.queue.wire import StoredResult

K = TypeVar("K", bound=Hashable)

MAX_BEHIND_BYTES = 4 * 1024 * 1024
"""Of deltas, as they lie in memory, and of results handed over, that a watcher has not taken: four frames. A reader at
any speed a person or a log can follow is never that far behind; one that is gets the rest of a text with its result."""

PENDING_BYTES = 1024
"""What a delta that waits takes besides its content: a message with an arena of its own, its key and its entry."""

MERGED_BYTES = 1024 * 1024
"""Of deltas, as they are sent, that become one: what is merged is an event of a frame, and a frame has a limit."""

PIECE_BYTES = 256
"""What a delta that is merged into a waiting one takes besides its content: entries of lists and their objects."""


RESULT_BYTES = 256
"""What a result that waits takes besides its body: an object, a number, the object of its bytes and its entry."""


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
    wire_bytes: int
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
    """One open Watch or Follow stream."""

    def __init__(self, behind_bytes: int = MAX_BEHIND_BYTES, number: int = 0) -> None:
        """Keep at most `behind_bytes` of deltas, and as much of results, until they are taken."""
        self.number = number
        """Of all the hub's watchers this one alone has it."""
        self._most_bytes = behind_bytes
        self.ended: dict[int, StoredResult | None] = {}
        """Requests that ended and were not taken yet, with their result or None to be read from the store (streams by
        name only)."""
        self.started_over = False
        """Whether the queue has been rebuilt from its store: what ended meanwhile was told to nobody."""
        self._of_batch: list[StoredResult] | None = None
        """Results of the watched batch since they were last taken; None if the store has some that are not here."""
        self._told_bytes = 0
        self._behind_bytes = 0
        self._news = asyncio.Event()
        self._deltas: dict[tuple[str, int], list[_Pending]] = {}
        """By request and completion, in order."""
        self._positions: defaultdict[str, dict[int, _Position]] = defaultdict(dict)

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
        deltas = [pending.merged() for waiting in self._deltas.values() for pending in waiting]
        self._deltas.clear()
        self._behind_bytes = 0
        return deltas

    def end(self, seq: int, result: StoredResult | None) -> None:
        """Note that a request has ended, with its result if it is at hand and not too much is kept already."""
        size_bytes = 0 if result is None else len(result.body)
        if self._told_bytes + size_bytes > self._most_bytes:
            result, size_bytes = None, 0
        self._told_bytes += size_bytes
        self.ended[seq] = result

    def end_in_batch(self, result: StoredResult | None) -> None:
        """Note that a request of the watched batch has ended, with its result if that is at hand."""
        if self._of_batch is None:
            return
        size_bytes = 0 if result is None else len(result.body) + RESULT_BYTES
        if result is None or self._told_bytes + size_bytes > self._most_bytes:
            self.miss_results()
            return
        self._told_bytes += size_bytes
        self._of_batch.append(result)

    def miss_results(self) -> None:
        """Leave what has ended in the watched batch, and what ends before the next look, to be read from the store."""
        if self._of_batch is not None:
            self._of_batch = None
            self._told_bytes = 0

    def take_results(self) -> list[StoredResult] | None:
        """Return the results of the watched batch since this was last asked, None if some have to be read.

        Whoever then reads the log to its end has all: what ends from now on is handed over again.
        """
        results, self._of_batch = self._of_batch, []
        self._told_bytes = 0
        return results

    def take_ended(self) -> dict[int, StoredResult | None]:
        """Return the requests that ended and were not taken yet."""
        ended, self.ended = self.ended, {}
        self._told_bytes = 0
        return ended

    def forget(self, request_id: str) -> None:
        """Forget how far the completions of a request were: it has ended, or is to be told from its start."""
        self._positions.pop(request_id, None)

    def add(self, delta: request_pb2.TokenDelta) -> None:
        """Merge one delta; what the watcher has already is cut off, what leaves a gap waits for the whole.

        Past the bound it is dropped, as if the watcher had come late: those after it leave a gap then.
        """
        key = (delta.request_id, delta.index)
        wire_bytes = delta.ByteSize()
        size_bytes = wire_bytes + (PIECE_BYTES if key in self._deltas else PENDING_BYTES)
        if self._behind_bytes + size_bytes > self._most_bytes:
            return
        positions = self._positions[delta.request_id]
        position = positions.get(delta.index)
        if position is None or position.attempt < delta.attempt:
            position = positions[delta.index] = _Position(delta.attempt)
            self._deltas.pop(key, None)
        if delta.attempt < position.attempt or not _cut(delta, position):
            return
        self._behind_bytes += size_bytes
        position.tokens += len(delta.token_ids)
        position.characters += len(delta.text)
        waiting = self._deltas.setdefault(key, [])
        if not waiting or waiting[-1].wire_bytes + wire_bytes > MERGED_BYTES:
            waiting.append(_Pending(delta, wire_bytes, []))
        else:
            waiting[-1].wire_bytes += wire_bytes
            waiting[-1].more.append((delta.text, list(delta.token_ids), list(delta.logprobs), list(delta.parts)))
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
        self._by_batch: defaultdict[BatchKey, set[Watcher]] = defaultdict(set)
        self._by_seq: defaultdict[int, set[Watcher]] = defaultdict(set)
        self._tokens_by_batch: defaultdict[BatchKey, set[Watcher]] = defaultdict(set)
        self._tokens_by_seq: defaultdict[int, set[Watcher]] = defaultdict(set)
        self._progress: dict[BatchKey, tuple[int, int]] = {}
        self._watchers: set[Watcher] = set()
        self._numbers = count(1)

    def __len__(self) -> int:
        """Return the number of watchers."""
        return len(self._watchers)

    @contextmanager
    def watcher(self, behind_bytes: int = MAX_BEHIND_BYTES) -> Iterator[Watcher]:
        """Register a watcher of nothing yet, for which at most `behind_bytes` are kept; see `follow`."""
        watcher = Watcher(behind_bytes, next(self._numbers))
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    @contextmanager
    def batch(self, batch: BatchKey, tokens: bool, behind_bytes: int = MAX_BEHIND_BYTES) -> Iterator[Watcher]:
        """Register a watcher of every request of a batch, and of their token deltas if `tokens`; see `watcher`."""
        registries = (self._by_batch, self._tokens_by_batch) if tokens else (self._by_batch,)
        with self.watcher(behind_bytes) as watcher:
            for registry in registries:
                registry[batch].add(watcher)
            try:
                yield watcher
            finally:
                for registry in registries:
                    _discard(registry, batch, watcher)

    @contextmanager
    def requests(self, seqs: Iterable[int], tokens: bool) -> Iterator[Watcher]:
        """Register a watcher of these requests, and of their token deltas if `tokens`."""
        named = set(seqs)
        with self.watcher() as watcher:
            for seq in named:
                self.follow(watcher, seq, tokens)
            try:
                yield watcher
            finally:
                for seq in named:
                    self.leave(watcher, seq)

    def follow(self, watcher: Watcher, seq: int, tokens: bool) -> None:
        """Tell `watcher` of this request from now on, and of its token deltas if `tokens`."""
        self._by_seq[seq].add(watcher)
        if tokens:
            self._tokens_by_seq[seq].add(watcher)

    def leave(self, watcher: Watcher, seq: int) -> None:
        """Tell `watcher` no more of this request."""
        _discard(self._by_seq, seq, watcher)
        _discard(self._tokens_by_seq, seq, watcher)

    def progress(self, batch: BatchKey) -> tuple[int, int]:
        """Return the durable (waiting, running) of a batch."""
        return self._progress.get(batch, (0, 0))

    def update(self, progress: dict[BatchKey, tuple[int, int]]) -> None:
        """Take the durable counts of batches that changed.

        Watchers are told of them beside results, and wake here only where nothing is left, which may be their end.
        """
        for batch, counts in progress.items():
            if any(counts):
                self._progress[batch] = counts
                continue
            self._progress.pop(batch, None)
            for watcher in self._by_batch.get(batch, ()):
                watcher.notify()

    def reset(self, progress: dict[BatchKey, tuple[int, int]]) -> None:
        """Start over from what the store holds, and wake everyone."""
        self._progress = {batch: counts for batch, counts in progress.items() if any(counts)}
        for watcher in self._watchers:
            watcher.started_over = True
            watcher.miss_results()
            watcher.notify()

    def ended(self, seq: int, batch: BatchKey, request_id: str, result: StoredResult | None) -> None:
        """Tell the watchers that a request has a durable result, which they have to read if it is None."""
        for watcher in self._by_seq.get(seq, ()):
            watcher.end(seq, result)
            watcher.forget(request_id)
            watcher.notify()
        for watcher in self._by_batch.get(batch, ()):
            watcher.end_in_batch(result)
            watcher.forget(request_id)
            watcher.notify()

    def publish(self, seq: int, batch: BatchKey, delta: request_pb2.TokenDelta) -> int:
        """Give a token delta to those who want it; return how many did."""
        wanting = [*self._tokens_by_seq.get(seq, ()), *self._tokens_by_batch.get(batch, ())]
        for watcher in wanting:
            copy = request_pb2.TokenDelta()
            copy.CopyFrom(delta)
            watcher.add(copy)
        return len(wanting)


def _discard(registry: defaultdict[K, set[Watcher]], key: K, watcher: Watcher) -> None:
    watchers = registry.get(key)
    if watchers is None:
        return
    watchers.discard(watcher)
    if not watchers:
        del registry[key]
