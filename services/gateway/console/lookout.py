"""What the console shows, read from queue and scheduler once per interval for everybody who looks."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from penstock.client import Client
from penstock.errors import PenstockError
from penstock.live.history import STEP_S
from penstock.live.state import tally, urgency
from penstock.live.view import View, Worker, busiest_first
from penstock.live.watcher import Watcher
from services.gateway.batch.records import BatchRecords
from services.gateway.core.batch import Batch
from services.gateway.recent import Recent

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two readings while somebody looks: people do not read numbers that change faster."""

ANSWER_S = 2.0
"""Longest wait for a service that accepts calls and does not answer them; the page waits as long."""

MOST_WORKERS = 100
"""On the page; of a larger fleet those that are not up, then the first ones by name. Bounds the page's work and, with
the numbers below, the bytes of a poll (100 KB)."""

MOST_DEPARTED = 20
"""Workers on the page that have gone, the latest ones."""

MOST_CHANNELS = 100
"""On the page; of more those in which most waits."""

MOST_HELD = 8
"""Channels told apart in the blocks of one worker, those that hold most."""

MOST_PROBLEMS = 20
"""On the page, the worst ones: each model that requests wait for in vain is one."""

MOST_DEAD = 20
"""Dead letters on the page, the oldest ones; `penstock dead list` has all."""

MOST_BATCHES = 10
"""Batches on the page, the newest ones; `GET /v1/batches` has all."""

MOST_ERROR_CHARACTERS = 500
"""Of a dead letter's error: enough for what went wrong, without the traceback that some engines add."""


class Lookout:
    """The latest reading, and what the ones before it leave behind: rates and a ring of KV usage."""

    def __init__(self, client: Client, batches: BatchRecords, recent: Recent) -> None:
        """Read through `client` and `batches`, which must not retry."""
        self._client = client
        self._batches = batches
        self._recent = recent
        self._watcher = Watcher(client, ANSWER_S)
        self._read_s = float("-inf")
        self._encoded = b""
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Take a sample every STEP_S, for ever, so that whoever comes finds the last minutes."""
        while True:
            try:
                async with self._looking:
                    if time.monotonic() - self._read_s >= STEP_S:
                        await self._read()
            except Exception:
                log.exception("the console could not take a reading")
            await asyncio.sleep(max(0.1, STEP_S - (time.monotonic() - self._read_s)))

    async def state(self) -> bytes:
        """Return the state as JSON, at most INTERVAL_S old."""
        async with self._looking:
            if time.monotonic() - self._read_s >= INTERVAL_S:
                await self._read()
            if not self._encoded:
                self._encoded = json.dumps(await self._state(), separators=(",", ":")).encode()
        return self._encoded

    def changed(self) -> None:
        """Read anew when next asked: somebody has just changed something."""
        self._read_s = float("-inf")

    async def _read(self) -> None:
        await self._watcher.look()
        self._read_s = time.monotonic()
        self._encoded = b""

    async def _state(self) -> dict[str, Any]:
        view = self._watcher.view
        shown = shown_of(view)
        workers = [worker["name"] for worker in shown["workers"]]
        return {
            **shown,
            "interval_s": INTERVAL_S,
            "now_unix_s": time.time(),
            "history": self._watcher.history.series(time.monotonic(), workers)._asdict(),
            "dead": await self._letters(view.fleet.dead),
            "batches": None if view.fleet.dead is None else await _if_answered(self._newest_batches()),
            "recent": [asdict(asked) for asked in self._recent.latest_first()],
        }

    async def _letters(self, dead: int | None) -> list[dict[str, Any]] | None:
        """Return the oldest of so many dead letters; None if they are not known."""
        return await _if_answered(self._dead()) if dead else None if dead is None else []

    async def _dead(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with aclosing(self._client.dead_letters(MOST_DEAD)) as letters:
            async for letter in letters:
                found.append(asdict(letter) | {"last_error": letter.last_error[:MOST_ERROR_CHARACTERS]})
                if len(found) == MOST_DEAD:
                    break
        return found

    async def _newest_batches(self) -> list[dict[str, Any]]:
        batches, _ = await self._batches.page("", MOST_BATCHES)
        return [_summary(batch) for batch in batches]


def shown_of(view: View) -> dict[str, Any]:
    """Return what the page shows of a view, and how much of each kind it leaves out."""
    # By name, and chosen by no number that changes from one second to the next: a card stays where it is, also under
    # the button that has just drained its worker.
    urgent = sorted(view.workers, key=lambda worker: urgency(worker.state, 0))
    workers = sorted(urgent[:MOST_WORKERS], key=lambda worker: worker.name)
    channels = sorted(busiest_first(view.channels)[:MOST_CHANNELS], key=lambda channel: channel.name)
    return {
        "fleet": asdict(view.fleet),
        "channels": [asdict(channel) for channel in channels],
        "channels_left_out": len(view.channels) - len(channels),
        "workers": [_worker(worker) for worker in workers],
        "workers_left_out": len(view.workers) - len(workers),
        "states_left_out": tally(worker.state for worker in urgent[MOST_WORKERS:]),
        "departed": [asdict(departed) for departed in view.departed[:MOST_DEPARTED]],
        "departed_left_out": max(0, len(view.departed) - MOST_DEPARTED),
        "tenants": [asdict(tenant) for tenant in view.tenants],
        "problems": view.problems[:MOST_PROBLEMS],
        "problems_left_out": max(0, len(view.problems) - MOST_PROBLEMS),
    }


def _worker(worker: Worker) -> dict[str, Any]:
    """Return a worker, with the channels that hold least of it taken together."""
    most = sorted(worker.held_blocks, key=lambda channel: -worker.held_blocks[channel])[:MOST_HELD]
    held = {channel: worker.held_blocks[channel] for channel in sorted(most)}
    return {
        **asdict(worker),
        "held_blocks": held,
        "other_channels": len(worker.held_blocks) - len(held),
        "other_blocks": worker.all_held_blocks - sum(held.values()),
    }


def _summary(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.batch_id,
        "status": str(batch.status),
        "endpoint": batch.endpoint,
        "created_at": batch.created_at,
        "error": batch.errors[0].message[:MOST_ERROR_CHARACTERS] if batch.errors else "",
        **asdict(batch.counts),
        "failed": batch.counts.failed_lines,
    }


async def _if_answered(asking: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """Return a list of the queue's; None, which is not "none", if it does not answer any more."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await asking
    except (PenstockError, TimeoutError):
        return None
