"""Stores with any number of waiting requests, written as the queue writes them: by its machine, in synced batches."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from penstock.request.v1 import request_pb2 as pb
from services.queue import wire
from services.queue.core.effects import Write
from services.queue.core.entry import Recovered
from services.queue.core.machine import Machine
from services.queue.core.messages import NewRequest, Submit
from services.queue.core.workers import Rules
from services.queue.storage.recovery import store_id_of
from services.queue.storage.rocksdb_store import RocksdbStore

PROMPT_BYTES = 1024

BATCH_REQUESTS = 2_000
"""Requests of one synced write: a store of a million is built in about a minute."""

CHANNELS = ("interactive", "batch")
INTERACTIVE_EVERY = 100
"""One request in so many is interactive; the rest is batch."""

RULES = Rules(CHANNELS, 3, 60 * 10**9, 10 * 10**9, 4096, 10 * 10**9)


def build(directory: Path, requests: int) -> RocksdbStore:
    """Make a store in `directory` where so many requests wait; it is still open."""
    store = RocksdbStore(directory)
    store_id = store_id_of(store, lambda: "bench000")
    recovered = Recovered()
    for first in range(0, requests, BATCH_REQUESTS):
        numbers = range(first, min(first + BATCH_REQUESTS, requests))
        # A fresh machine for each batch goes on from the counters alone: it need not keep what the store holds.
        machine = Machine(store_id, RULES, Recovered(recovered.counters), time.time_ns())
        effects = machine.step(Submit(0, tuple(_new(number) for number in numbers)), time.time_ns())
        writes = [effect for effect in effects if isinstance(effect, Write)]
        store.write([*writes, machine.seal().counters])
    return store


def _new(number: int) -> NewRequest:
    prompt = random.Random(number).randbytes(PROMPT_BYTES // 2).hex()
    request = pb.Request(
        text=prompt,
        channel=CHANNELS[bool(number % INTERACTIVE_EVERY)],
        batch=f"batch-{number % 7}",
        idempotency_key=f"{number:032x}",
        client_reference=str(number),
        traceparent=f"00-{number:032x}-{number + 1:016x}-01",
        sampling=pb.SamplingParams(max_tokens=16),
    )
    return NewRequest(wire.meta_of(request, request.ByteSize()), request.SerializeToString())


def main() -> None:
    """Build the store that the command line names, say so, and wait to be killed: a queue's end is never planned."""
    directory, requests = sys.argv[1:]
    store = build(Path(directory), int(requests))
    print(json.dumps({"built": int(requests)}), flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
