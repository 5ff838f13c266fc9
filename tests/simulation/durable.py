"""The referee of the disk: every batch that becomes durable is held against what the queue promises."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.core.entry import Counters, parse_request_id
from tests.simulation.world import BrokenPromiseError, demand

STORE_ID = "5eed5eed"


class Durable:
    """What is on disk, by request, as the batches say; incremental, so that a check costs what a batch costs."""

    def __init__(self, max_attempts: int) -> None:
        """Begin with an empty disk."""
        self._max_attempts = max_attempts
        self.live: set[int] = set()
        self.ready: set[int] = set()
        self.leases: dict[int, int] = {}
        """Fencing token by request."""
        self.dead: dict[int, int] = {}
        """Request by position in the completion log."""
        self.dead_seqs: set[int] = set()
        self.results: set[int] = set()
        self.outcomes: dict[int, int] = {}
        """Results ever written, by request."""
        self.revived: dict[int, int] = {}
        """Dead letters brought back, by request."""
        self.read: set[int] = set()
        """Requests whose outcome a client has read and asked to delete."""
        self.last_cursor = 0
        self.last_token = 0
        self._counters = Counters()
        self._keys: dict[bytes, int] = {}
        self._touched: set[int] = set()
        self._last: dict[int, Write] = {}
        """Rows of the last batch, by identity: the same row may be written again, and must reach the disk again."""
        self._erased: set[int] = set()
        """Requests whose result this batch deletes."""
        self._take = {
            records.REQUESTS: self._take_request,
            records.READY: self._take_ready,
            records.LEASES: self._take_lease,
            records.DEAD: self._take_dead,
            records.RESULTS: self._take_result,
            records.COMPLETIONS: self._take_completion,
            records.IDEMPOTENCY: self._take_key,
            records.META: self._take_meta,
        }

    def batch(self, writes: Sequence[Write]) -> None:
        """Take one batch; raises BrokenPromiseError if what is on disk after it breaks a promise."""
        self._last = {id(write): write for write in writes}
        for write in writes:
            family, key, value = write.family, write.key, write.value
            take = self._take.get(family)
            if take is not None:
                take(key, value)
        for seq in self._touched:
            if seq in self._erased and seq in self.live:
                self._revive(seq)
            self._check(seq)
        self._touched.clear()
        self._erased.clear()
        counted = self._counters.results
        demand(counted == len(self.results), f"the store counts {counted} results, {len(self.results)} are there")

    def _check(self, seq: int) -> None:
        """Hold one request against the law: it waits, runs, is dead, or has ended, and is never gone unread."""
        places = (seq in self.ready) + (seq in self.leases) + (seq in self.dead_seqs)
        demand(places == (seq in self.live), f"request {seq} is in {places} states on disk")
        ended = seq in self.results
        demand(not (ended and places) or seq in self.dead_seqs, f"request {seq} has an outcome and still lives")
        if not places and not ended:
            demand(seq in self.read, f"request {seq} is gone and nobody has read its outcome")

    def _revive(self, seq: int) -> None:
        self._erased.discard(seq)
        self.revived[seq] = self.revived.get(seq, 0) + 1

    # ---- one family each ----

    def _take_request(self, key: bytes, value: bytes | None) -> None:
        seq = records.seq_of(key)
        self._touched.add(seq)
        if value is None:
            self.live.discard(seq)
        else:
            self.live.add(seq)

    def _take_ready(self, key: bytes, value: bytes | None) -> None:
        seq = records.ready_seq(key)
        self._touched.add(seq)
        if value is None:
            self.ready.discard(seq)
        else:
            self.ready.add(seq)
            attempts = json.loads(value)[1]
            demand(attempts <= self._max_attempts, f"request {seq} waits after {attempts} attempts")

    def _take_lease(self, key: bytes, value: bytes | None) -> None:
        seq = records.seq_of(key)
        self._touched.add(seq)
        if value is None:
            self.leases.pop(seq, None)
            return
        _, attempts, _, token, *_ = json.loads(value)
        demand(0 < attempts <= self._max_attempts, f"request {seq} is leased for attempt {attempts}")
        if self.leases.get(seq) != token:
            demand(token > self.last_token, f"request {seq}: fencing token {token} is not new")
            self.last_token = token
        self.leases[seq] = token

    def _take_dead(self, key: bytes, value: bytes | None) -> None:
        position = records.seq_of(key)
        if value is not None:
            seq = self.dead[position] = records.dead_seq(value)
            self.dead_seqs.add(seq)
            self._touched.add(seq)
            return
        seq = self.dead.pop(position)
        self.dead_seqs.discard(seq)
        self._touched.add(seq)

    def _take_result(self, key: bytes, value: bytes | None) -> None:
        seq = records.seq_of(key)
        self._touched.add(seq)
        if value is None:
            self.results.discard(seq)
            self._erased.add(seq)
            return
        if seq in self._erased:
            self._revive(seq)
        self.results.add(seq)
        self.outcomes[seq] = count = self.outcomes.get(seq, 0) + 1
        demand(count == 1 + self.revived.get(seq, 0), f"request {seq} has {count} outcomes")

    def _take_completion(self, key: bytes, value: bytes | None) -> None:
        if value is not None:
            position = records.completion_seq_of(key)
            demand(position > self.last_cursor, f"the completion log went back to {position}")
            self.last_cursor = position

    def _take_key(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._keys.pop(key, None)
            return
        seq = records.seq_of(value)
        before = self._keys.get(key)
        demand(before in {None, seq}, f"the key {key!r} named request {before} and now names {seq}")
        self._keys[key] = seq

    def _take_meta(self, key: bytes, value: bytes | None) -> None:
        if key != records.COUNTERS_KEY or value is None:
            return
        now = records.decode_counters(value)
        before, self._counters = self._counters, now
        grown = now.seq >= before.seq and now.fencing_token >= before.fencing_token
        demand(grown and now.completion_seq >= before.completion_seq, "a counter went back")

    # ---- what others ask ----

    def has_synced(self, write: Write) -> bool:
        """Return whether this very row was in the last batch that became durable."""
        return id(write) in self._last

    def exists(self, request_id: str) -> bool:
        """Return whether the request is on disk, alive or ended, or was deleted by who has read its outcome."""
        seq = parse_request_id(STORE_ID, request_id)
        return seq in self.live or seq in self.results or seq in self.read

    def ended(self, request_id: str) -> bool:
        """Return whether the request has an outcome on disk, or had one that was read."""
        seq = parse_request_id(STORE_ID, request_id)
        return seq in self.results or seq in self.read

    def has_read(self, request_id: str) -> None:
        """Note that its client has read the outcome, and may have it deleted."""
        seq = parse_request_id(STORE_ID, request_id)
        if seq not in self.outcomes:
            raise BrokenPromiseError(f"{request_id} is read before its outcome is on disk")
        self.read.add(seq)
