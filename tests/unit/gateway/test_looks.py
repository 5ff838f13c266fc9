"""Batches' results are looked at in turns: open batches and slow downloads keep no stream that others need."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from penstock.client import Client
from penstock.queue.v1.queue_pb2 import WatchResponse
from services.gateway.batch import looks
from services.gateway.batch.looks import AT_ONCE, FIRST_PAUSE_S, GAP_S, PAUSE_S, Looks, page_of
from services.gateway.batch.output import Output
from services.gateway.batch.records import new_batch_id
from services.gateway.core.batch import Batch, Counts, Lease, Progress, Status
from tests.support.waiting import wait_for_async
from tests.unit.gateway.test_drive import LINES, Rig, _true_of, rig

__all__ = ["rig"]

OPEN = 5
BEGUN: dict[str, Any] = {"status": Status.IN_PROGRESS, "counts": Counts(LINES), "progress": Progress()}


def leave_one_watch(client: Client) -> None:
    client._queue._watches = asyncio.Semaphore(1)


async def ended(rig: Rig) -> Batch:
    """Return a batch that has ended, of which each line has a result."""
    batch = await rig.batch()
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == LINES), "the submission")
    await rig.client.cancel(batch=batch.batch_id)
    await driving
    return (await rig.records.get(batch.batch_id))[0]


async def test_more_batches_than_watches_are_driven_to_their_ends_and_files_are_read_meanwhile(rig: Rig) -> None:
    done = await ended(rig)
    leave_one_watch(rig.client)
    batches = [replace(done, batch_id=new_batch_id(), lease=Lease(), **BEGUN) for _ in range(OPEN)]
    for batch in batches:
        await rig.records.add(batch)
    driven = [asyncio.create_task(rig.drive(await rig.take(batch, "me")).run()) for batch in batches]
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == OPEN * LINES), "the submissions")
    assert sorted(await rig.error_ids(done)) == sorted(f"line-{n}" for n in range(LINES))
    for batch in batches:
        await rig.client.cancel(batch=batch.batch_id)
    await asyncio.gather(*driven)
    for batch in batches:
        found, _ = await rig.records.get(batch.batch_id)
        assert (found.status, found.counts.failed) == (Status.COMPLETED, LINES)


async def test_a_slow_download_keeps_no_watch_and_loses_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "PAGE_RESULTS", 4)
    done = await ended(rig)
    leave_one_watch(rig.client)
    async with aclosing(Output(rig.client, rig.shelf).lines(done, errors=True)) as slow:
        lines = [await anext(slow) for _ in range(6)]
        others = [line async for line in Output(rig.client, rig.shelf).lines(done, errors=True)]
        lines += [line async for line in slow]
    assert lines == others
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"line-{n}" for n in range(LINES))


async def test_a_page_ends_where_it_is_full_and_the_next_begins_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await ended(rig)
    whole = await page_of(rig.client, done.batch_id, 0)
    assert (len(whole.results), whole.under_way, whole.last) == (LINES, 0, True)
    monkeypatch.setattr(looks, "PAGE_BYTES", 1)
    first = await page_of(rig.client, done.batch_id, 0)
    assert (first.results, first.last) == (whole.results[:1], False)
    assert (await page_of(rig.client, done.batch_id, first.results[0].cursor)).results == whole.results[1:2]


async def test_a_page_that_ends_before_its_stream_leaves_nothing_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sweeps for long what holds itself, and a frame of a large result takes 12 MiB."""
    done = await ended(rig)
    monkeypatch.setattr(looks, "PAGE_BYTES", 1)
    gc.collect()
    await asyncio.sleep(0)
    gc.disable()
    try:
        before = sum(isinstance(one, WatchResponse) for one in gc.get_objects())
        for _ in range(3):
            await page_of(rig.client, done.batch_id, 0)
        assert sum(isinstance(one, WatchResponse) for one in gc.get_objects()) == before
    finally:
        gc.enable()


async def test_what_is_counted_in_pages_is_counted_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "PAGE_RESULTS", 4)
    assert (await ended(rig)).counts.failed == LINES


async def test_a_batch_of_which_requests_wait_is_not_counted_to_its_end(rig: Rig) -> None:
    batch = await rig.batch(**BEGUN)
    driving = asyncio.create_task(rig.drive(await rig.take(batch, "me")).run())
    await wait_for_async(lambda: _true_of(lambda: len(rig.keys()) == LINES), "the submission")
    assert (await page_of(rig.client, batch.batch_id, 0)).under_way == LINES
    driving.cancel()


def test_all_open_batches_together_look_so_often() -> None:
    shared = Looks()
    with shared.pauses() as pauses:
        assert list(islice(pauses, 6))[::5] == [FIRST_PAUSE_S, PAUSE_S]
    many = int(2 * PAUSE_S / GAP_S)
    taken = [shared.pauses() for _ in range(many)]
    all_pauses = [one.__enter__() for one in taken]
    assert [list(islice(pauses, 20))[-1] for pauses in all_pauses] == [many * GAP_S] * many
    for one in taken:
        one.__exit__(None, None, None)
    with shared.pauses() as pauses:
        assert list(islice(pauses, 20))[-1] == PAUSE_S


async def test_so_many_batches_are_counted_at_once() -> None:
    assert Looks().place._value == AT_ONCE
