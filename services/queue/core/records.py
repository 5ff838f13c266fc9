"""Keys and rows of the store. Keys are big-endian, so that the store's byte order is the order we want.

Rows of metadata are short JSON arrays that open with a version number; a row of
the families `ready`, `leases` and `dead` says what state its request is in, and
the row in `requests` never changes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NamedTuple

from services.core.value import fields
from services.queue.core.ages import Ages, Gap
from services.queue.core.entry import DEFAULT_TENANT, EMPTY_META, BatchKey, Counters, Entry, RequestMeta
from services.queue.core.lifecycle import Outcome, State

SCHEMA_VERSION: Final = 3
"""Of the whole store; a store with a higher one is refused at start-up, one with a lower one is brought up to it.

1: requests. 2: the families of files and records besides. 3: everything has a tenant, requests have the size of
their payload, and the completion log is in order of tenant and batch (`services/queue/storage/migration.py`)."""

REQUESTS: Final = "requests"
PAYLOADS: Final = "payloads"
READY: Final = "ready"
LEASES: Final = "leases"
RESULTS: Final = "results"
COMPLETIONS: Final = "completions"
EXPIRY: Final = "expiry"
IDEMPOTENCY: Final = "idempotency"
DEAD: Final = "dead"
META: Final = "meta"
FILES: Final = "files"
PARTS: Final = "parts"
RECORDS: Final = "records"

REQUEST_FAMILIES: Final = (REQUESTS, PAYLOADS, READY, LEASES, RESULTS, COMPLETIONS, EXPIRY, IDEMPOTENCY, DEAD)
"""Written by the committer, with META."""

FILE_FAMILIES: Final = (FILES, PARTS, RECORDS)
"""Written by the shelf (`services/queue/files/shelf.py`)."""

FAMILIES: tuple[str, ...] = (*REQUEST_FAMILIES, META, *FILE_FAMILIES)

SCHEMA_KEY: Final = b"schema_version"
STORE_ID_KEY: Final = b"store_id"
COUNTERS_KEY: Final = b"counters"
CLOCK_KEY: Final = b"clock"
STOPPED_KEY: Final = b"stopped"
"""Of earlier versions, which noted stops in order; nothing reads it."""

_ROW_VERSION: Final = 1
_UNCOUNTED_ROW_VERSION: Final = 2
"""Of rows in `ready`, `leases` and `dead` that end with the number of uncounted attempts; others have none."""
_META_ROW_VERSION: Final = 2
"""Of rows in `requests`; 1 had no payload_bytes."""
_PAIR: Final = struct.Struct(">QQ")
_LENGTH: Final = struct.Struct(">H")
_LINE: Final = struct.Struct(">IQ")
_COUNTERS: Final = struct.Struct(">QQQQ")
_RESULT: Final = struct.Struct(">BQQH")
_PRIORITY_ZERO: Final = 1 << 31
"""Added to priorities, so that negative ones sort first as unsigned numbers."""


_META_FIELDS: Final = list(fields(EMPTY_META))
_SHARED: Final = tuple([_META_FIELDS.index(name) for name in ("tenant", "channel", "model", "batch")])


class ResultHead(NamedTuple):
    """What stands before an encoded result: all that deleting it needs."""

    completion_seq: int
    completed_ns: int
    tenant: str
    idempotency_key: str
    batch: str

    @property
    def batch_key(self) -> BatchKey:
        """The batch it belongs to."""
        return (self.tenant, self.batch)


_quoted: Final = encode_basestring_ascii
"""A JSON string."""


def _state_row(values: str, entry: Entry) -> bytes:
    """Return a row of what the JSON in `values` says of an entry, and of its uncounted attempts if there are any."""
    if entry.uncounted:
        return f"[{_UNCOUNTED_ROW_VERSION},{values},{entry.uncounted}]".encode()
    return f"[{_ROW_VERSION},{values}]".encode()


def _state_values(row: bytes) -> list[Any]:
    """Return what such a row says, the number of uncounted attempts at the end."""
    values = json.loads(row)
    if isinstance(values, list) and values[:1] == [_UNCOUNTED_ROW_VERSION]:
        return values[1:]
    return [*_versioned(values), 0]


def _versioned(values: object, wanted: int = _ROW_VERSION) -> list[Any]:
    """Return what follows the version; raises ValueError if that is not the `wanted` one."""
    if not isinstance(values, list) or not values:
        raise ValueError("row is not a list that opens with a version")
    version = values.pop(0)
    if version != wanted:
        raise ValueError(f"row has version {version}; this program reads version {wanted}")
    return values


@lru_cache(maxsize=1024)
def _text(text: str) -> bytes:
    """Return a name with its length; of channels, batches and tenants there are few."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def seq_key(seq: int) -> bytes:
    """Return the key of request `seq` in `requests`, `payloads`, `leases` and `results`."""
    return seq.to_bytes(8, "big")


def seq_of(key: bytes) -> int:
    """Return the number that `seq_key` encoded."""
    return int.from_bytes(key, "big")


def ready_key(entry: Entry) -> bytes:
    """Return the key in `ready`: channel, priority, position."""
    return _text(entry.meta.channel) + _LINE.pack(entry.meta.priority + _PRIORITY_ZERO, entry.seq)


def ready_seq(key: bytes) -> int:
    """Return the request of a key in `ready`."""
    return seq_of(key[-8:])


def idempotency_key(tenant: str, key: str) -> bytes:
    """Return the key in `idempotency`."""
    return _text(tenant) + key.encode()


def completion_key(batch: BatchKey, completion_seq: int) -> bytes:
    """Return the key in `completions`; those of one batch are in completion order."""
    tenant, name = batch
    return _text(tenant) + _text(name) + seq_key(completion_seq)


def completion_seq_of(key: bytes) -> int:
    """Return the position in the log of a key in `completions` or `dead`."""
    return seq_of(key[-8:])


def expiry_key(completed_ns: int, seq: int) -> bytes:
    """Return the key in `expiry`: results by age."""
    return _PAIR.pack(completed_ns, seq)


def expiry_of(key: bytes) -> tuple[int, int]:
    """Return (completed_ns, seq) of a key in `expiry`; raises ValueError if it is not one."""
    if len(key) != _PAIR.size:
        raise ValueError(f"a key of {len(key)} bytes")
    completed_ns, seq = _PAIR.unpack(key)
    return completed_ns, seq


def encode_meta(meta: RequestMeta) -> bytes:
    """Return the row in `requests`."""
    # Written out, because this and the rows below are made for every request: json.dumps takes twice as long.
    return (
        f"[{_META_ROW_VERSION},{_quoted(meta.tenant)},{_quoted(meta.idempotency_key)},{_quoted(meta.channel)},"
        f"{_quoted(meta.model)},{_quoted(meta.batch)},{meta.priority},{meta.deadline_ns},{_quoted(meta.traceparent)},"
        f"{_quoted(meta.client_reference)},{meta.prompt_bytes},{meta.prompt_tokens},{meta.max_tokens},{meta.n},"
        f"{'true' if meta.chat else 'false'},{meta.prefix_digest},{meta.payload_bytes},{meta.submitted_ns}]"
    ).encode()


def decode_meta(row: bytes) -> RequestMeta:
    """Read a row of `requests`; raises ValueError or TypeError if it is not one."""
    return decode_metas([row])[0]


def decode_metas(rows: Sequence[bytes]) -> list[RequestMeta]:
    """Read rows of `requests`; raises ValueError or TypeError if one is not such a row.

    All at once, which takes the JSON decoder a third of the time that it takes for one row after the other.
    """
    metas = [_meta(values) for values in json.loads(b"[" + b",".join(rows) + b"]")]
    if len(metas) != len(rows):
        raise ValueError(f"{len(rows)} rows hold {len(metas)} values")
    return metas


def _meta(row: object) -> RequestMeta:
    values = _versioned(row, _META_ROW_VERSION)
    if len(values) == len(_META_FIELDS):
        # Few names for many requests: one string each instead of one for every request of a loaded backlog.
        for index in _SHARED:
            values[index] = sys.intern(values[index])
    return meta_of_values(values)


def meta_of_values(values: list[Any]) -> RequestMeta:
    """Return the metadata that has these in its fields; raises ValueError if there are not as many."""
    if len(values) != len(_META_FIELDS):
        raise ValueError(f"metadata has {len(_META_FIELDS)} fields, the row {len(values)}")
    return RequestMeta(*values)


def encode_ready(entry: Entry) -> bytes:
    """Return the row in `ready`."""
    return _state_row(f"{entry.attempts},{_quoted(entry.last_error)}", entry)


def restore_ready(entry: Entry, row: bytes) -> None:
    """Set what a row of `ready` says."""
    entry.state = State.READY
    entry.attempts, entry.last_error, entry.uncounted = _ready_values(row)


@lru_cache(maxsize=64)
def _ready_values(row: bytes) -> tuple[int, str, int]:
    """Return (attempts, last error, uncounted ones); nearly every request that waits was never run: the same row."""
    attempts, last_error, uncounted = _state_values(row)
    return attempts, last_error, uncounted


def encode_lease(entry: Entry) -> bytes:
    """Return the row in `leases`."""
    stop = int(entry.stop_outcome or 0)
    return _state_row(
        f"{entry.attempts},{_quoted(entry.last_error)},{entry.fencing_token},"
        f"{_quoted(entry.worker_id)},{_quoted(entry.instance_id)},{entry.leased_ns},{stop}",
        entry,
    )


def restore_lease(entry: Entry, row: bytes) -> None:
    """Set what a row of `leases` says."""
    (
        entry.attempts,
        entry.last_error,
        entry.fencing_token,
        entry.worker_id,
        entry.instance_id,
        entry.leased_ns,
        stop,
        entry.uncounted,
    ) = _state_values(row)
    entry.stop_outcome = Outcome(stop) if stop else None
    entry.state = State.STOPPING if stop else State.LEASED


def encode_dead(entry: Entry) -> bytes:
    """Return the row in `dead`."""
    return _state_row(f"{entry.seq},{entry.attempts},{_quoted(entry.last_error)},{entry.died_ns}", entry)


def restore_dead(entry: Entry, row: bytes) -> None:
    """Set what a row of `dead` says, except its completion_seq, which is the key."""
    entry.state = State.DEAD
    _, entry.attempts, entry.last_error, entry.died_ns, entry.uncounted = _state_values(row)


def dead_seq(row: bytes) -> int:
    """Return the request of a row of `dead`; raises ValueError if it is not one."""
    seq, _, _, _, _ = _state_values(row)
    return int(seq)


def encode_counters(counters: Counters) -> bytes:
    """Return the row of the counters in `meta`."""
    return _COUNTERS.pack(counters.seq, counters.fencing_token, counters.completion_seq, counters.results)


def decode_counters(row: bytes) -> Counters:
    """Read the row of the counters; raises ValueError if it is not one."""
    if len(row) != _COUNTERS.size:
        raise ValueError(f"the counters take {_COUNTERS.size} bytes, the row has {len(row)}")
    return Counters(*_COUNTERS.unpack(row))


def encode_clock(known_ns: int, ages: Ages) -> bytes:
    """Return the row of the clock in `meta`: the last that is known of it, and the gaps that are not counted."""
    return seq_key(known_ns) + b"".join(_PAIR.pack(*gap) for gap in ages.gaps)


def decode_clock(row: bytes) -> tuple[int, Ages]:
    """Read the row of the clock; raises ValueError if it is not one."""
    known, gaps = row[:8], row[8:]
    if len(known) < 8 or len(gaps) % _PAIR.size:
        raise ValueError(f"the row of the clock has {len(row)} bytes")
    return seq_of(known), Ages(tuple([Gap(*pair) for pair in _PAIR.iter_unpack(gaps)]))


def encode_result(head: ResultHead, body: bytes) -> bytes:
    """Return the row in `results`: the head, then the encoded result."""
    names = f"[{_quoted(head.tenant)},{_quoted(head.idempotency_key)},{_quoted(head.batch)}]".encode()
    return _RESULT.pack(_ROW_VERSION, head.completion_seq, head.completed_ns, len(names)) + names + body


def decode_result(row: bytes) -> tuple[ResultHead, bytes]:
    """Return the head and the encoded result of a row of `results`; raises ValueError if it is not one."""
    return decode_head(row), row[_result_head(row)[2] :]


def decode_head(row: bytes) -> ResultHead:
    """Return the head of a row of `results`, with no copy of what is behind it; raises ValueError if it is not one."""
    completion_seq, completed_ns, end = _result_head(row)
    tenant, key, batch = _names(row[_RESULT.size : end])
    # Results, which are large, are not written anew when a store of schema 2 is brought up to date.
    return ResultHead(completion_seq, completed_ns, tenant or DEFAULT_TENANT, key, batch)


def _names(row: bytes) -> list[str]:
    names = json.loads(row)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the names of a result row are not texts")
    return names


def split_result(row: bytes) -> tuple[int, bytes]:
    """Return the completion_seq and the encoded result of a row of `results`: all that reading it needs."""
    completion_seq, _, end = _result_head(row)
    return completion_seq, row[end:]


def _result_head(row: bytes) -> tuple[int, int, int]:
    """Return completion_seq, completed_ns and where the encoded result begins."""
    if len(row) < _RESULT.size:
        raise ValueError(f"a result row of {len(row)} bytes")
    version, completion_seq, completed_ns, length = _RESULT.unpack_from(row)
    if version != _ROW_VERSION:
        raise ValueError(f"result row has version {version}; this program reads version {_ROW_VERSION}")
    return completion_seq, completed_ns, _RESULT.size + length
