"""Drives batches from validating to their end. Every gateway runs one; whoever holds a batch's lease drives it.

Nothing is in memory that matters: where a batch is stands in its record, each line has one idempotency key for ever,
and results are counted up to a cursor. So a gateway that is killed anywhere leaves what the next one goes on from, and
two that drive one batch for a moment submit the same requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

from penstock.client import Client
from penstock.credentials import act_for
from penstock.errors import PenstockError, ServiceError
from services.gateway.batch.drive import Drive
from services.gateway.batch.looks import Looks
from services.gateway.batch.records import BatchRecords, DamagedError, Held, LeaseLostError, Stillness
from services.gateway.batch.turns import Turns
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import Served
from services.gateway.shelf import Shelf

log = logging.getLogger(__name__)

POLLS_OF_LEASE = 3
"""Looks for batches without a driver in the time of one lease, at least."""

MOST_POLL_S = 3.0
"""Between two of them: what a batch that was handed back waits for at most."""


class Driver:
    """Finds batches nobody drives, and drives them."""

    def __init__(
        self,
        client: Client,
        shelf: Shelf,
        records: BatchRecords,
        served: Served,
        metrics: GatewayMetrics,
        lease_s: float,
    ) -> None:
        """Hold batches for `lease_s` seconds at a time."""
        self._client = client
        self._shelf = shelf
        self._records = records
        self._served = served
        self._metrics = metrics
        self._lease_s = lease_s
        self._owner = secrets.token_hex(8)
        self._driving: dict[str, asyncio.Task[None]] = {}
        self._stillness = Stillness()
        self._look = asyncio.Event()
        self._turns = Turns()
        self._looks = Looks()

    def wake(self) -> None:
        """Look for batches now: there is a new one."""
        self._look.set()

    async def run(self) -> None:
        """Drive batches until cancelled; then give back what is held."""
        try:
            while True:
                self._look.clear()
                try:
                    await self._find()
                except PenstockError as error:
                    log.warning("batches cannot be listed now: %s", error)
                except Exception:  # nobody waits for this task: were it to end, batches would rest in silence
                    log.exception("batches cannot be looked for now")
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(self._lease_s / POLLS_OF_LEASE, MOST_POLL_S)):
                        await self._look.wait()
        finally:
            for task in self._driving.values():
                task.cancel()
            await asyncio.gather(*self._driving.values(), return_exceptions=True)

    async def _find(self) -> None:
        ids = await self._records.open_ids()
        self._metrics.open_batches.set(len(ids))
        self._stillness.forget_all_but(ids)
        for batch_id in ids:
            if batch_id in self._driving:
                continue
            try:
                held = await Held.take(self._records, batch_id, self._owner, self._lease_s, over=self._stillness.over)
            except (DamagedError, ServiceError):  # its row is no record, or fails its checksum: the other batches go on
                log.exception("%s cannot be read", batch_id)
                continue
            if held is not None:
                task = asyncio.create_task(self._drive(held), name=batch_id)
                self._driving[batch_id] = task
                task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._driving.pop(task.get_name(), None)

    def _drive_of(self, held: Held) -> Drive:
        return Drive(self._client, self._shelf, self._served, self._metrics, held, self._turns, self._looks)

    async def _drive(self, held: Held) -> None:
        batch_id = held.batch.batch_id
        act_for(held.batch.tenant)
        try:
            await self._drive_of(held).run()
            self._metrics.ended_batches.labels(str(held.batch.status)).inc()
        except LeaseLostError:
            log.warning("%s is driven by another gateway", batch_id)
        except PenstockError as error:
            log.warning("%s rests until it is taken again: %s", batch_id, error)
        except asyncio.CancelledError:
            with suppress(PenstockError):
                await held.give_back()
            raise
        except Exception:
            log.exception("%s rests until it is taken again", batch_id)
