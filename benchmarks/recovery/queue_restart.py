"""How soon a queue takes submits again, by the number of requests that wait in its store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from benchmarks.lifecycle.processes import Child, free_port, python
from penstock.queue.v1 import queue_pb2
from penstock.queue.v1.queue_pb2_grpc import QueueServiceStub
from penstock.request.v1 import request_pb2 as pb

MOST_S = 300.0
"""Longest anything here may take."""

RETRY_S = 0.01
"""Between two attempts to submit while the queue is not there: what a figure may be late by."""


class Restart(NamedTuple):
    """One start of a queue. Seconds are from the start of its process."""

    waiting: int
    first_ack_s: float
    """Until the first new submit was durable and acked."""
    loaded_s: float
    """Until every waiting request was known, and so could be announced, claimed, cancelled or looked up."""
    cpu_s: float
    """CPU time of the queue until then."""
    slowest_ack_s: float
    """The longest a submit took while requests were being loaded."""
    rss_mib: float


def restarts(directory: Path, counts: Sequence[int], rounds: int) -> dict[int, list[Restart]]:
    """Build a store of each size with a builder that is killed, and start a queue on it `rounds` times, each killed."""
    found = {}
    for count in counts:
        store = directory / f"store-{count}"
        # Killed at the end, so that the first start has a log to replay, as after any kill of a queue.
        builder = Child("builder", python("benchmarks.recovery.stores", str(store), str(count)), directory / "log")
        builder.answer()
        builder.kill()
        found[count] = [restart(store, directory / "log") for _ in range(rounds)]
        print(f"{count} waiting: {[started._asdict() for started in found[count]]}", flush=True)
    return found


def restart(store: Path, log: Path) -> Restart:
    """Start a queue on `store`, submit until it is loaded, and kill it."""
    address = f"127.0.0.1:{free_port()}"
    began_s = time.monotonic()
    queue = Child("queue", python("services.queue", "--listen", address, "--data-dir", str(store)), log)
    try:
        with grpc.insecure_channel(address, options=[("grpc.initial_reconnect_backoff_ms", 20)]) as channel:
            stub = QueueServiceStub(channel)
            _submit_when_there(stub, queue)
            first_ack_s = time.monotonic() - began_s
            # Only a queue that knows everything answers this one.
            stats = stub.Stats.future(queue_pb2.StatsRequest(), timeout=MOST_S)
            slowest_s = 0.0
            while not stats.done():
                asked_s = time.monotonic()
                _submit(stub)
                slowest_s = max(slowest_s, time.monotonic() - asked_s)
                time.sleep(RETRY_S)
            waiting = sum(channel.ready for channel in stats.result().channels)
            loaded_s = time.monotonic() - began_s
            return Restart(
                waiting, first_ack_s, loaded_s, queue.cpu_s()["queue"], slowest_s, queue.memory_bytes() / 2**20
            )
    finally:
        queue.kill()


def _submit_when_there(stub: QueueServiceStub, queue: Child) -> None:
    until_s = time.monotonic() + MOST_S
    while True:
        try:
            return _submit(stub)
        except grpc.RpcError as error:
            if time.monotonic() > until_s or queue.process.poll() is not None:
                raise SystemExit(f"the queue takes no submits: {error}") from None
            time.sleep(RETRY_S)


def _submit(stub: QueueServiceStub) -> None:
    request = pb.Request(text="again", channel="batch", idempotency_key=secrets.token_hex(16))
    answer = stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[request]), timeout=MOST_S)
    assert answer.acks[0].status == queue_pb2.SUBMIT_STATUS_ACCEPTED, answer
