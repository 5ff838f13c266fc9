"""Checks every invariant between the families of a store that nobody uses. It only reads.

Every row is looked at once, and of each what other families must say about it; whole families are never in memory.
What is checked is written at the method of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from penstock.request.v1 import request_pb2
from services.core.value import fields
from services.queue.core import records as r
from services.queue.core.entry import EMPTY_META, Counters, Entry, RequestMeta
from services.queue.core.lifecycle import Outcome, State
from services.queue.storage.store import Row, Store
from services.queue.storage.verify_files import FileVerifier, Finding

PAGE_ROWS = 1024
"""Rows of metadata read at once."""

PAGE_BODIES = 16
"""Payloads or results read at once: each may have 12 MiB."""

STOPS = (Outcome.CANCELLED, Outcome.EXPIRED)
KNOWN_META = {r.SCHEMA_KEY, r.STORE_ID_KEY, r.COUNTERS_KEY, r.CLOCK_KEY, r.STOPPED_KEY, b"probe"}
UNREADABLE = (ValueError, TypeError, DecodeError)
"""What decoders of rows raise."""

SEQ_BYTES = 8
LAST_SEQ = (1 << 64) - 1
"""Of a sequence number in a key, and the largest there is."""

T = TypeVar("T")


class Violation(NamedTuple):
    """What is wrong with the row of one key."""

    family: str
    key: bytes
    text: str

    def line(self) -> str:
        """Return it as a line for people; keys are in hexadecimal."""
        return f"{self.family} {self.key.hex() or '-'}: {self.text}"


class Verifier:
    """One verification. `counts` has the rows of each family once `violations` is exhausted."""

    def __init__(self, store: Store, decode_payloads: bool = True) -> None:
        """Read `store`; without `decode_payloads` these may be any bytes."""
        self.counts = dict.fromkeys(r.FAMILIES, 0)
        self._store = store
        self._decode_payloads = decode_payloads
        self._counters = Counters()
        self._tokens: dict[int, int] = {}

    def violations(self) -> Iterator[Violation]:
        """Yield what is wrong, family by family. Raises StoreError if the disk fails."""
        yield from self._meta()
        files = FileVerifier(self._store)
        checks: list[tuple[str, int, Callable[[Sequence[Row]], Iterator[Violation]]]] = [
            (r.REQUESTS, PAGE_ROWS, self._requests),
            (r.PAYLOADS, PAGE_BODIES, self._payloads),
            (r.READY, PAGE_ROWS, self._ready),
            (r.LEASES, PAGE_ROWS, self._leases),
            (r.DEAD, PAGE_ROWS, self._dead),
            (r.RESULTS, PAGE_BODIES, self._results),
            (r.COMPLETIONS, PAGE_ROWS, self._completions),
            (r.EXPIRY, PAGE_ROWS, self._expiry),
            (r.IDEMPOTENCY, PAGE_ROWS, self._idempotency),
            (r.FILES, PAGE_ROWS, _found_by(files.files)),
            (r.PARTS, PAGE_BODIES, _found_by(files.parts)),
            (r.RECORDS, PAGE_BODIES, _found_by(files.records)),
        ]
        for family, rows, check in checks:
            for page in _pages(self._store, family, rows):
                self.counts[family] += len(page)
                yield from check(page)
        if self.counts[r.RESULTS] != self._counters.results:
            text = f"{self._counters.results} results are counted, {self.counts[r.RESULTS]} are kept"
            yield Violation(r.META, r.COUNTERS_KEY, text)

    # ---- families ----

    def _meta(self) -> Iterator[Violation]:
        """Schema known, store named, counters and clock readable, and nothing else."""
        rows = dict(self._store.scan(r.META, b"", b"", PAGE_ROWS))
        self.counts[r.META] = len(rows)
        schema = rows.get(r.SCHEMA_KEY)
        if schema != str(r.SCHEMA_VERSION).encode():
            yield Violation(r.META, r.SCHEMA_KEY, f"schema version {schema!r}, this program knows {r.SCHEMA_VERSION}")
        if not rows.get(r.STORE_ID_KEY):
            yield Violation(r.META, r.STORE_ID_KEY, "the store has no name")
        if r.COUNTERS_KEY in rows:
            counters = _read(r.decode_counters, rows[r.COUNTERS_KEY])
            if counters is None:
                yield Violation(r.META, r.COUNTERS_KEY, "the counters cannot be read")
            else:
                self._counters = counters
        if r.CLOCK_KEY in rows and _read(r.decode_clock, rows[r.CLOCK_KEY]) is None:
            yield Violation(r.META, r.CLOCK_KEY, "the clock cannot be read")
        for key in rows.keys() - KNOWN_META:
            yield Violation(r.META, key, "not a row this program writes")

    def _requests(self, page: Sequence[Row]) -> Iterator[Violation]:
        """A payload; exactly one of waiting, leased and dead; a result if and only if dead; its idempotency key."""
        entries = []
        for key, row in page:
            meta = _meta_of(row) if len(key) == SEQ_BYTES else None
            if meta is None:
                yield Violation(r.REQUESTS, key, "cannot be read")
            else:
                entries.append(Entry(r.seq_of(key), meta))
        keys = [r.seq_key(entry.seq) for entry in entries]
        payloads = self._keys_between(r.PAYLOADS, keys)
        ready = self._store.get_many(r.READY, [r.ready_key(entry) for entry in entries])
        leases = self._store.get_many(r.LEASES, keys)
        results = self._store.get_many(r.RESULTS, keys)
        dead = self._dead_of(results)
        named = self._store.get_many(r.IDEMPOTENCY, [_key_of(entry.meta) for entry in entries])
        for i, entry in enumerate(entries):
            if keys[i] not in payloads:
                yield Violation(r.REQUESTS, keys[i], "has no payload")
            places = [("ready", ready[i]), ("leases", leases[i]), ("dead", dead[i])]
            found = [place for place, row in places if row is not None]
            if len(found) != 1:
                yield Violation(r.REQUESTS, keys[i], f"is in {' and '.join(found) or 'none of ready, leases and dead'}")
            if results[i] is not None and dead[i] is None:
                yield Violation(r.REQUESTS, keys[i], "has a result and is no dead letter")
            if entry.meta.idempotency_key and named[i] != keys[i]:
                yield Violation(r.REQUESTS, keys[i], _names_another(named[i]))
            if not 1 <= entry.seq <= self._counters.seq:
                yield Violation(r.REQUESTS, keys[i], f"the last number given out is {self._counters.seq}")

    def _payloads(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a live request, and an encoded Request with a prompt."""
        for (key, row), request in zip(page, self._of(r.REQUESTS, page), strict=True):
            if request is None:
                yield Violation(r.PAYLOADS, key, "no such request lives")
            if self._decode_payloads:
                payload = _read(request_pb2.Request.FromString, row)
                if payload is None or payload.WhichOneof("prompt") is None:
                    yield Violation(r.PAYLOADS, key, "cannot be read")

    def _ready(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a request, under the channel and the priority the request has."""
        seqs = [r.seq_key(r.ready_seq(key)) for key, _ in page]
        for (key, row), seq, request in zip(page, seqs, self._store.get_many(r.REQUESTS, seqs), strict=True):
            entry = _entry(seq, request)
            if entry is None:
                yield Violation(r.READY, key, f"request {r.seq_of(seq)} does not live")
            elif r.ready_key(entry) != key:
                yield Violation(r.READY, key, f"request {entry.seq} belongs at {r.ready_key(entry).hex()}")
            elif not _restored(r.restore_ready, entry, row):
                yield Violation(r.READY, key, "cannot be read")

    def _leases(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a request; attempt and fencing token given out, the token to nobody else; stopped for a reason."""
        for (key, row), request in zip(page, self._of(r.REQUESTS, page), strict=True):
            entry = _entry(key, request)
            if entry is None:
                yield Violation(r.LEASES, key, "no such request lives")
                continue
            if not _restored(r.restore_lease, entry, row):
                yield Violation(r.LEASES, key, "cannot be read")
                continue
            if entry.attempts < 1 or not 1 <= entry.fencing_token <= self._counters.fencing_token:
                yield Violation(r.LEASES, key, f"attempt {entry.attempts}, fencing token {entry.fencing_token}")
            other = self._tokens.setdefault(entry.fencing_token, entry.seq)
            if other != entry.seq:
                yield Violation(r.LEASES, key, f"fencing token {entry.fencing_token} is also of request {other}")
            if entry.state is State.STOPPING and entry.stop_outcome not in STOPS:
                yield Violation(r.LEASES, key, f"to be stopped as {entry.stop_outcome}")

    def _dead(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a request, with a result that says so, at the same place of the log and of the same time."""
        for key, row in page:
            seq = _read(r.dead_seq, row)
            if seq is None or not 0 <= seq <= LAST_SEQ:
                yield Violation(r.DEAD, key, "cannot be read")
                continue
            entry = _entry(r.seq_key(seq), self._store.get(r.REQUESTS, r.seq_key(seq)))
            if entry is None:
                yield Violation(r.DEAD, key, f"request {seq} does not live")
                continue
            if not _restored(r.restore_dead, entry, row):
                yield Violation(r.DEAD, key, "cannot be read")
                continue
            head, body = self._result_of(seq)
            if head is None or (head.completion_seq, head.completed_ns) != (r.seq_of(key), entry.died_ns):
                yield Violation(r.DEAD, key, f"request {seq} has no result of this death")
            elif body is not None and int(body.outcome) != Outcome.DEAD:
                yield Violation(r.DEAD, key, f"the result of request {seq} has outcome {body.outcome}")

    def _results(self, page: Sequence[Row]) -> Iterator[Violation]:
        """A place in the log and one by age, which name it; its idempotency key; an encoded Result with an outcome."""
        for key, row in page:
            decoded = _read(r.decode_result, row)
            body = None if decoded is None else _read(request_pb2.Result.FromString, decoded[1])
            if decoded is None or body is None:
                yield Violation(r.RESULTS, key, "cannot be read")
                continue
            head, _ = decoded
            if int(body.outcome) not in tuple(Outcome):
                yield Violation(r.RESULTS, key, f"has outcome {body.outcome}")
            if not 1 <= head.completion_seq <= self._counters.completion_seq:
                yield Violation(r.RESULTS, key, f"is at place {head.completion_seq} of the completion log")
            if self._store.get(r.COMPLETIONS, r.completion_key(head.batch_key, head.completion_seq)) != key:
                yield Violation(r.RESULTS, key, f"is not at place {head.completion_seq} of the completion log")
            if self._store.get(r.EXPIRY, r.expiry_key(head.completed_ns, r.seq_of(key))) is None:
                yield Violation(r.RESULTS, key, "is not among the results by age")
            if head.idempotency_key:
                named = self._store.get(r.IDEMPOTENCY, r.idempotency_key(head.tenant, head.idempotency_key))
                if named != key:
                    yield Violation(r.RESULTS, key, _names_another(named))

    def _completions(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a result, at its place and in its batch."""
        for key, seq in page:
            head, _ = self._result_of(r.seq_of(seq))
            if head is None or r.completion_key(head.batch_key, head.completion_seq) != key:
                yield Violation(r.COMPLETIONS, key, f"request {r.seq_of(seq)} has no result at this place")

    def _expiry(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a result of this age."""
        for key, _ in page:
            when = _read(r.expiry_of, key)
            head, _ = (None, None) if when is None else self._result_of(when[1])
            if when is None or head is None or head.completed_ns != when[0]:
                yield Violation(r.EXPIRY, key, "there is no such result of this age")

    def _idempotency(self, page: Sequence[Row]) -> Iterator[Violation]:
        """Of a request or a result that has this key."""
        requests = self._store.get_many(r.REQUESTS, [seq for _, seq in page])
        for (key, seq), request in zip(page, requests, strict=True):
            entry = _entry(seq, request)
            head, _ = self._result_of(r.seq_of(seq))
            lives = entry is not None and _key_of(entry.meta) == key
            ended = head is not None and r.idempotency_key(head.tenant, head.idempotency_key) == key
            if not (lives or ended):
                yield Violation(r.IDEMPOTENCY, key, f"request {r.seq_of(seq)} does not have this key")

    # ---- look-ups ----

    def _of(self, family: str, page: Sequence[Row]) -> list[bytes | None]:
        return self._store.get_many(family, [key for key, _ in page])

    def _keys_between(self, family: str, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys of a family from the first to the last of `keys`, without keeping its rows."""
        if not keys:
            return set()
        pages = _pages(self._store, family, PAGE_BODIES, keys[0], keys[-1] + b"\0")
        return {key for page in pages for key, _ in page}

    def _dead_of(self, results: Sequence[bytes | None]) -> list[bytes | None]:
        heads = [None if row is None else _read(r.decode_result, row) for row in results]
        keys = [None if head is None else r.seq_key(head[0].completion_seq) for head in heads]
        return [None if key is None else self._store.get(r.DEAD, key) for key in keys]

    def _result_of(self, seq: int) -> tuple[r.ResultHead | None, request_pb2.Result | None]:
        row = self._store.get(r.RESULTS, r.seq_key(seq)) if seq <= LAST_SEQ else None
        decoded = None if row is None else _read(r.decode_result, row)
        return (None, None) if decoded is None else (decoded[0], _read(request_pb2.Result.FromString, decoded[1]))


def _found_by(check: Callable[[Sequence[Row]], Iterator[Finding]]) -> Callable[[Sequence[Row]], Iterator[Violation]]:
    return lambda page: (Violation(*found) for found in check(page))


def _pages(store: Store, family: str, rows: int, start: bytes = b"", end: bytes = b"") -> Iterator[list[Row]]:
    while page := store.scan(family, start, end, rows):
        yield page
        start = page[-1][0] + b"\0"


def _read(decode: Callable[[bytes], T], row: bytes) -> T | None:
    try:
        return decode(row)
    except UNREADABLE:
        return None


def _restored(restore: Callable[[Entry, bytes], None], entry: Entry, row: bytes) -> bool:
    try:
        restore(entry, row)
    except UNREADABLE:
        return False
    counts = isinstance(entry.attempts, int) and isinstance(entry.uncounted, int) and entry.uncounted >= 0
    return counts and isinstance(entry.last_error, str)


def _meta_of(row: bytes) -> RequestMeta | None:
    """Return the metadata if every field has the type that is written."""
    meta = _read(r.decode_meta, row)
    return None if meta is None or _types(meta) != _types(EMPTY_META) else meta


def _types(meta: RequestMeta) -> list[type]:
    return [type(value) for value in fields(meta).values()]


def _entry(key: bytes, request: bytes | None) -> Entry | None:
    meta = None if request is None else _meta_of(request)
    return None if meta is None else Entry(r.seq_of(key), meta)


def _key_of(meta: RequestMeta) -> bytes:
    return r.idempotency_key(meta.tenant, meta.idempotency_key)


def _names_another(named: bytes | None) -> str:
    return "its idempotency key names " + ("no request" if named is None else f"request {r.seq_of(named)}")
