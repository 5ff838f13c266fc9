"""Whatever the rows of a store hold: a queue starts on it or calls it damaged, and verifying it names the damage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.queue.core import records
from services.queue.core.effects import Write
from services.queue.storage.recovery import recover
from services.queue.storage.store import StoreUnusableError
from services.queue.storage.verify import Verifier
from tests.support.arbitrary import fuzzed
from tests.unit.queue.test_verify import one_of_each

FAMILIES = records.REQUEST_FAMILIES
INDEXES = [family for family in FAMILIES if family != records.PAYLOADS]
"""Families of which every row is held against others; a payload may be any request."""

values = st.binary(max_size=24) | st.sampled_from(
    [
        b"",
        b"[]",
        b"[1]",
        b"[2]",
        b"{}",
        b"7",
        b'[1,"",""]',
        b"[1,1,1]",
        b'[1,-1,1,"",1]',
        b"[1," + b"[" * 99,
        b"\xff" * 9,
    ]
)


@fuzzed
@given(st.data())
def test_a_damaged_row_is_named_and_never_an_exception(data: st.DataObject) -> None:
    store = one_of_each().store
    family = data.draw(st.sampled_from([*FAMILIES, records.META]))
    keys = [key for key, _ in store.scan(family, b"", b"", 10)]
    key = data.draw(st.sampled_from(keys))
    before = store.get(family, key)
    value = data.draw(st.none() | values)
    store.write([Write(family, key, value)])
    found = [violation.line() for violation in Verifier(store).violations()]
    if family == records.EXPIRY and value is not None:
        assert found == [], "its rows are keys alone"
    elif family in INDEXES and value != before:
        assert found, (family, key, value)
    try:
        recover(store)
    except StoreUnusableError as error:
        assert "the store is damaged" in str(error)


@fuzzed
@given(st.sampled_from([*FAMILIES, *records.FILE_FAMILIES]), st.binary(min_size=1, max_size=20), values)
def test_a_foreign_row_is_named_and_never_an_exception(family: str, key: bytes, value: bytes) -> None:
    store = one_of_each().store
    store.write([Write(family, key, value)])
    assert list(Verifier(store).violations())
