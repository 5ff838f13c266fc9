"""An interactive stream's first byte does not wait for the batches that are read, submitted and waiting beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import penstock as public
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_gateway import gateway_of
from tests.integration.test_gateway_batches import begin, client_of, completions, jsonl
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for
from tests.support.web import asked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LINES = int(os.environ.get("GATEWAY_LINES", "3000"))
SEQUENCES = 16
"""Of the engine: all that can run at once."""

MOST_LINES_BEFORE = 3 * SEQUENCES
"""Batch lines that may be answered between the question and its first byte: those that ran when it came, those that
were granted meanwhile, and as many once more for a machine that does something else. Thousands wait."""

STREAMS = 8
HELD_UP = 2
"""Of the streams, those that may have met a pause of the whole machine."""
BODY: dict[str, Any] = {"model": "tiny", "prompt": "now", "max_tokens": 4, "ignore_eos": True, "stream": True}


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("first"))
    try:
        fleet.start_core()
        size = ["--num-gpu-blocks-override", "2001", "--max-num-seqs", str(SEQUENCES), "--profile", "cpu-tiny"]
        fleet.add_worker("w1", [*SIMULATED_FLAGS, *size])
        gateway_of(fleet)
        yield fleet
    finally:
        fleet.close()


async def asked_and_told(address: str) -> tuple[int, int]:
    """Return when a stream was asked for and when its first token came, in Unix nanoseconds."""
    asked_ns = time.time_ns()
    async with asked(address, "POST", "/v1/completions", BODY) as response:
        events = response.events()
        await anext(events)
        told_ns = time.time_ns()
        async for _ in events:
            continue
    return asked_ns, told_ns


async def test_few_lines_are_answered_before_the_first_byte(fleet: Fleet) -> None:
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    batches = [begin(client, jsonl(completions(LINES, max_tokens=16, ignore_eos=True))).id]

    def some_answered() -> bool:
        counts = client.batches.retrieve(batches[0]).request_counts
        return counts is not None and counts.completed > 0

    wait_for(some_answered, "the first batch to be worked on", 120)
    batches.append(begin(client, jsonl(completions(LINES, max_tokens=16))).id)
    spans = [await asked_and_told(gateway.address) for _ in range(STREAMS)]
    for batch_id in batches:
        client.batches.cancel(batch_id)
    ends_ns: list[int] = []
    left = 0
    async with public.Client(fleet.queue.address, fleet.scheduler.address) as queue:
        for batch_id in batches:
            with suppress(public.NotFound):  # the second may be cancelled before any of its lines is submitted
                async for result in queue.watch(batch_id):
                    if result.completed:
                        ends_ns.append(result.timings.completed_unix_ns)
                    else:
                        left += 1
    before = [sum(asked_ns < end_ns < told_ns for end_ns in ends_ns) for asked_ns, told_ns in spans]
    assert sorted(before)[-1 - HELD_UP] <= MOST_LINES_BEFORE, before
    assert left > 10 * MOST_LINES_BEFORE, "so many were still waiting when the last stream began"
