"""The verification of a store at rest: a sound one passes, and each kind of damage is named with its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.request.v1.request_pb2 import Result
from services.queue.core import records as r
from services.queue.core.effects import Write
from services.queue.core.entry import DEFAULT_TENANT, Entry, Failure
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import Cancel, Complete, Delete, EndedRow, WorkerOpened
from services.queue.storage.store import Store
from services.queue.storage.verify import Verifier
from tests.support.queueing import Queue, meta

READY, LEASED, DEAD, DONE = (r.seq_key(seq) for seq in (1, 2, 3, 4))
MISSING = r.seq_key(77)


def one_of_each() -> Queue:
    """Return a queue with request 1 ready, 2 leased, 3 dead and 4 cancelled; batch `b`, keys `k1` to `k4`."""
    queue = Queue()
    names = queue.submit(*(meta(batch="b", idempotency_key=f"k{n}") for n in range(1, 5)))
    queue.step(WorkerOpened(1, "w", "life", ()))
    for _ in range(queue.rules.max_attempts):
        lease = queue.claim(1, names[2])
        assert lease is not None
        queue.step(Complete(1, lease, None, Failure("broken", "it broke"), None))
    queue.step(Cancel(1, (names[3],)))
    assert queue.claim(1, names[1]) is not None
    return queue


def found_in(store: Store) -> list[str]:
    return [violation.line() for violation in Verifier(store).violations()]


def test_a_sound_store_passes_and_is_counted() -> None:
    verifier = Verifier(one_of_each().store)
    assert list(verifier.violations()) == []
    counts = {family: count for family, count in verifier.counts.items() if family != r.META}
    assert counts == {
        "requests": 3, "payloads": 3, "ready": 1, "leases": 1, "dead": 1,
        "results": 2, "completions": 2, "expiry": 2, "idempotency": 4, "files": 0, "parts": 0, "records": 0,
    }  # fmt: skip


def test_an_empty_store_passes() -> None:
    assert found_in(Queue().store) == []


def test_a_store_after_a_deletion_passes() -> None:
    queue = one_of_each()
    head, _ = r.decode_result(queue.store.get(r.RESULTS, DONE) or b"")
    queue.step(Delete(1, (EndedRow(4, *head),)))
    assert found_in(queue.store) == []


def row(store: Store, family: str, key: bytes) -> bytes:
    found = store.get(family, key)
    assert found is not None
    return found


def only_key(store: Store, family: str, index: int = 0) -> bytes:
    return store.scan(family, b"", b"", 10)[index][0]


Damage = Callable[[Store], list[Write]]


def drop(family: str, key: bytes) -> Damage:
    return lambda _store: [Write(family, key, None)]


def put(family: str, key: bytes, value: bytes) -> Damage:
    return lambda _store: [Write(family, key, value)]


def drop_first(family: str, index: int = 0) -> Damage:
    return lambda store: [Write(family, only_key(store, family, index), None)]


def counters(**changes: int) -> Damage:
    def damage(store: Store) -> list[Write]:
        found = r.decode_counters(row(store, r.META, r.COUNTERS_KEY))
        for name, value in changes.items():
            setattr(found, name, value)
        return [Write(r.META, r.COUNTERS_KEY, r.encode_counters(found))]

    return damage


def lease(**changes: object) -> Damage:
    """Change the lease of request 2; `key` puts it under another request."""

    def damage(store: Store) -> list[Write]:
        entry = Entry(2, meta())
        r.restore_lease(entry, row(store, r.LEASES, LEASED))
        key = changes.pop("key", LEASED)
        assert isinstance(key, bytes)
        for name, value in changes.items():
            setattr(entry, name, value)
        return [Write(r.LEASES, key, r.encode_lease(entry))]

    return damage


def move_ready(channel: str) -> Damage:
    def damage(store: Store) -> list[Write]:
        key = only_key(store, r.READY)
        return [Write(r.READY, key, None), Write(r.READY, r.ready_key(Entry(1, meta(channel=channel))), b'[1,0,""]')]

    return damage


def result(key: bytes, outcome: Outcome | None) -> Damage:
    """Change the outcome of a result."""

    def damage(store: Store) -> list[Write]:
        head, _ = r.decode_result(row(store, r.RESULTS, key))
        body = Result(outcome=cast(Any, outcome or 0)).SerializeToString()
        return [Write(r.RESULTS, key, r.encode_result(head, body))]

    return damage


def wrong_type(store: Store) -> list[Write]:
    found = r.decode_meta(row(store, r.REQUESTS, READY))
    return [Write(r.REQUESTS, READY, r.encode_meta(found).replace(b'"batch"', b"7"))]


READY_KEY = r.ready_key(Entry(1, meta()))
COMPLETION_KEYS = [r.completion_key((DEFAULT_TENANT, "b"), place) for place in (1, 2, 9)]
IDEMPOTENT, ENDED_KEY = (r.idempotency_key(DEFAULT_TENANT, name) for name in ("k1", "k4"))

CASES: list[tuple[str, Damage, str]] = [
    ("schema missing", drop(r.META, r.SCHEMA_KEY), f"meta {r.SCHEMA_KEY.hex()}: schema version None"),
    ("schema newer", put(r.META, r.SCHEMA_KEY, b"9"), f"meta {r.SCHEMA_KEY.hex()}: schema version b'9'"),
    ("no name", drop(r.META, r.STORE_ID_KEY), f"meta {r.STORE_ID_KEY.hex()}: the store has no name"),
    ("counters cut", put(r.META, r.COUNTERS_KEY, b"\0"), f"meta {r.COUNTERS_KEY.hex()}: the counters cannot be read"),
    ("clock cut", put(r.META, r.CLOCK_KEY, b"\0"), f"meta {r.CLOCK_KEY.hex()}: the clock cannot be read"),
    ("foreign row", put(r.META, b"x", b""), "meta 78: not a row this program writes"),
    ("results miscounted", counters(results=3), f"meta {r.COUNTERS_KEY.hex()}: 3 results are counted, 2 are kept"),
    ("number not given out", counters(seq=2), f"requests {DEAD.hex()}: the last number given out is 2"),
    ("token not given out", counters(fencing_token=1), f"leases {LEASED.hex()}: attempt 1, fencing token 4"),
    ("place not given out", counters(completion_seq=1), f"results {DONE.hex()}: is at place 2 of the completion log"),
    ("request unreadable", put(r.REQUESTS, READY, b"7"), f"requests {READY.hex()}: cannot be read"),
    ("request of wrong types", wrong_type, f"requests {READY.hex()}: cannot be read"),
    ("request lost", drop(r.REQUESTS, READY), f"ready {READY_KEY.hex()}: request 1 does not live"),
    ("leased request lost", drop(r.REQUESTS, LEASED), f"leases {LEASED.hex()}: no such request lives"),
    ("dead request lost", drop(r.REQUESTS, DEAD), f"dead {r.seq_key(1).hex()}: request 3 does not live"),
    ("payload lost", drop(r.PAYLOADS, LEASED), f"requests {LEASED.hex()}: has no payload"),
    ("payload left over", put(r.PAYLOADS, MISSING, b""), f"payloads {MISSING.hex()}: no such request lives"),
    ("payload without a prompt", put(r.PAYLOADS, READY, b""), f"payloads {READY.hex()}: cannot be read"),
    ("payload unreadable", put(r.PAYLOADS, READY, b"\xff\xff"), f"payloads {READY.hex()}: cannot be read"),
    ("ready row lost", drop_first(r.READY), f"requests {READY.hex()}: is in none of ready, leases and dead"),
    ("ready elsewhere", move_ready("interactive"), f"request 1 belongs at {READY_KEY.hex()}"),
    ("ready row unreadable", put(r.READY, READY_KEY, b"[1]"), f"ready {READY_KEY.hex()}: cannot be read"),
    ("two states", lease(key=READY), f"requests {READY.hex()}: is in ready and leases"),
    ("token twice", lease(key=READY), f"leases {LEASED.hex()}: fencing token 4 is also of request 1"),
    ("lease unreadable", put(r.LEASES, LEASED, b'[1,"x"]'), f"leases {LEASED.hex()}: cannot be read"),
    ("lease of no attempt", lease(attempts=0), f"leases {LEASED.hex()}: attempt 0, fencing token 4"),
    ("stopped for nothing", put(r.LEASES, LEASED, b'[1,1,"",4,"w","life",1,5]'), "to be stopped as"),
    ("dead letter lost", drop(r.DEAD, r.seq_key(1)), f"requests {DEAD.hex()}: has a result and is no dead letter"),
    ("dead letter unreadable", put(r.DEAD, r.seq_key(1), b"[1]"), f"dead {r.seq_key(1).hex()}: cannot be read"),
    ("dead letter of no result", drop(r.RESULTS, DEAD), f"dead {r.seq_key(1).hex()}: request 3 has no result of this"),
    ("dead letter that completed", result(DEAD, Outcome.COMPLETED), "the result of request 3 has outcome 1"),
    ("result unreadable", put(r.RESULTS, DONE, b"?"), f"results {DONE.hex()}: cannot be read"),
    ("result without outcome", result(DONE, None), f"results {DONE.hex()}: has outcome 0"),
    ("result of a waiting request", put(r.RESULTS, READY, b"?"), f"requests {READY.hex()}: has a result"),
    ("log entry lost", drop(r.COMPLETIONS, COMPLETION_KEYS[1]), f"results {DONE.hex()}: is not at place 2 of the"),
    ("log entry of nothing", drop(r.RESULTS, DONE), f"completions {COMPLETION_KEYS[1].hex()}: request 4 has"),
    ("log entry doubled", put(r.COMPLETIONS, COMPLETION_KEYS[2], DONE), "request 4 has no result at this place"),
    ("age lost", drop_first(r.EXPIRY, 1), f"results {DONE.hex()}: is not among the results by age"),
    ("age of nothing", put(r.EXPIRY, r.expiry_key(9, 9), b""), "there is no such result of this age"),
    ("age key cut", put(r.EXPIRY, b"\0", b""), "expiry 00: there is no such result of this age"),
    ("key lost", drop(r.IDEMPOTENCY, IDEMPOTENT), f"requests {READY.hex()}: its idempotency key names no request"),
    ("key of another", put(r.IDEMPOTENCY, IDEMPOTENT, DONE), f"{READY.hex()}: its idempotency key names request 4"),
    ("key of nobody", put(r.IDEMPOTENCY, b"\0\0zz", MISSING), "idempotency 00007a7a: request 77 does not have"),
    ("ended key lost", drop(r.IDEMPOTENCY, ENDED_KEY), f"results {DONE.hex()}: its idempotency key"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "line"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_damage_is_named_with_its_key(damage: Damage, line: str) -> None:
    store = one_of_each().store
    store.write(damage(store))
    assert any(line in found for found in found_in(store)), found_in(store)


def test_payloads_need_not_be_requests_if_they_are_not_decoded() -> None:
    store = one_of_each().store
    store.write([Write(r.PAYLOADS, READY, b"\xff\xff")])
    assert list(Verifier(store, decode_payloads=False).violations()) == []


def test_many_pages_are_walked() -> None:
    queue = Queue()
    queue.submit(*(meta(idempotency_key=f"k{n}") for n in range(2_500)))
    verifier = Verifier(queue.store)
    assert list(verifier.violations()) == []
    assert verifier.counts[r.REQUESTS] == verifier.counts[r.PAYLOADS] == verifier.counts[r.IDEMPOTENCY] == 2_500
    queue.store.write([Write(r.PAYLOADS, r.seq_key(2_400), None)])
    assert found_in(queue.store) == [f"requests {r.seq_key(2_400).hex()}: has no payload"]
