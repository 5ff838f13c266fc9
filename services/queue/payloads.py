"""The stored requests that one batch of deliveries takes with it, within a bound."""

from __future__ import annotations

from collections.abc import Sequence

from services.queue.core import records
from services.queue.storage.store import Store, StoreError

PAYLOADS_AT_ONCE = 16
"""Requests read between two looks at their size: 192 MiB of the largest there can be."""

MAX_PAYLOADS_BYTES = 64 * 1024 * 1024
"""Of the requests that one batch reads for its deliveries: four thousand claims of 16 KiB prompts."""


def read_payloads(store: Store, wanted: Sequence[int]) -> dict[int, bytes]:
    """Return the encoded requests there are, by seq; past the bound the rest is left out.

    What is left out is read when its turn to be sent has come. So is what cannot be read, whatever the reason: here it
    would end a commit that others are in, and each later one in which somebody claims it again.
    """
    found: dict[int, bytes] = {}
    size_bytes = 0
    for first in range(0, len(wanted), PAYLOADS_AT_ONCE):
        if size_bytes >= MAX_PAYLOADS_BYTES:
            break
        seqs = wanted[first : first + PAYLOADS_AT_ONCE]
        try:
            rows = store.get_many(records.PAYLOADS, [records.seq_key(seq) for seq in seqs])
        except StoreError:
            rows = [_readable(store, seq) for seq in seqs]
        for seq, row in zip(seqs, rows, strict=True):
            if row is not None:
                found[seq] = row
                size_bytes += len(row)
    return found


def _readable(store: Store, seq: int) -> bytes | None:
    try:
        return store.get(records.PAYLOADS, records.seq_key(seq))
    except StoreError:
        return None
