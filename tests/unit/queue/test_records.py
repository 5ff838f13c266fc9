"""Rows and keys: what is written is what is read, and bytes sort as numbers do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.queue.core import records
from services.queue.core.entry import NO_SEQ, Counters, Entry, RequestMeta, parse_request_id, request_id_of
from services.queue.core.lifecycle import Outcome, State

META = RequestMeta("t", "k", "batch", "m", "b", -3, 5, "00-aa-bb-01", "line 7 é", 10, 0, 4, 1, True, 2**64 - 1, 99)

SEQS = st.integers(0, 2**64 - 1)
PRIORITIES = st.integers(-(2**31), 2**31 - 1)


def entry(seq: int = 7, priority: int = 0) -> Entry:
    return Entry(seq, META.replace(priority=priority))


def everything(of: Entry) -> dict[str, object]:
    """Return all that an entry says, comparable."""
    return {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}


def test_meta_survives() -> None:
    assert records.decode_meta(records.encode_meta(META)) == META


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_metadata_that_ends_early_is_not_read(missing: int) -> None:
    values = json.loads(records.encode_meta(META))
    with pytest.raises(ValueError, match="17 fields"):
        records.decode_meta(json.dumps(values[:-missing]).encode())


@given(st.tuples(PRIORITIES, SEQS), st.tuples(PRIORITIES, SEQS))
def test_ready_keys_sort_by_priority_then_seq(a: tuple[int, int], b: tuple[int, int]) -> None:
    keys = [records.ready_key(entry(seq, priority)) for priority, seq in (a, b)]
    assert (keys[0] < keys[1]) == (a < b)
    assert [records.ready_seq(key) for key in keys] == [a[1], b[1]]


@given(st.text(max_size=20), SEQS, st.text(max_size=20), SEQS)
def test_completion_keys_of_a_batch_are_together(batch: str, at: int, other: str, other_at: int) -> None:
    first, last = records.completion_key(("t", batch), 0), records.completion_key(("t", batch), 2**64 - 1)
    assert first <= records.completion_key(("t", batch), at) <= last
    inside = first <= records.completion_key(("t", other), other_at) <= last
    assert inside == (batch == other)


@given(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
def test_idempotency_keys_of_two_tenants_never_meet(tenant: str, key: str, tenant2: str, key2: str) -> None:
    same = records.idempotency_key(tenant, key) == records.idempotency_key(tenant2, key2)
    assert same == ((tenant, key) == (tenant2, key2))


def test_a_lease_survives_with_its_stop() -> None:
    old = entry()
    old.attempts, old.fencing_token, old.worker_id, old.instance_id, old.leased_ns = 2, 9, "w", "i", 44
    old.last_error, old.stop_outcome = "boom", Outcome.CANCELLED
    new = entry()
    records.restore_lease(new, records.encode_lease(old))
    old.state = State.STOPPING
    assert everything(new) == everything(old)


def test_a_dead_letter_survives() -> None:
    old = entry()
    old.attempts, old.last_error, old.died_ns, old.state = 3, "x", 12, State.DEAD
    row = records.encode_dead(old)
    new = entry()
    records.restore_dead(new, row)
    assert everything(new) == everything(old)
    assert records.dead_seq(row) == 7


def test_a_result_survives_behind_its_head() -> None:
    head = records.ResultHead(5, 6, "tenant", "key é", "batch")
    assert records.decode_result(records.encode_result(head, b"\x00body")) == (head, b"\x00body")


def test_counters_survive() -> None:
    counters = Counters(1, 2, 3, 4)
    assert records.decode_counters(records.encode_counters(counters)) == counters


@given(st.integers(0, 2**64 - 1))
def test_request_ids_name_one_seq(seq: int) -> None:
    assert parse_request_id("0a1b2c3d", request_id_of("0a1b2c3d", seq)) == seq


@given(st.text(max_size=30))
def test_other_names_are_no_request_ids(name: str) -> None:
    seq = parse_request_id("0a1b2c3d", name)
    assert seq == NO_SEQ or request_id_of("0a1b2c3d", seq) == name


def test_names_of_another_store_or_spelling_are_refused() -> None:
    for name in ("ffffffff-000000000001", "0a1b2c3d-1", "0a1b2c3d-0000000000001", "0a1b2c3d-00000000000A", ""):
        assert parse_request_id("0a1b2c3d", name) == NO_SEQ


def test_a_name_whose_number_no_key_can_hold_is_refused() -> None:
    assert parse_request_id("0a1b2c3d", f"0a1b2c3d-{2**64 - 1:x}") == 2**64 - 1
    for name in (f"0a1b2c3d-{2**64:x}", "0a1b2c3d-" + "f" * 1000):
        assert parse_request_id("0a1b2c3d", name) == NO_SEQ
