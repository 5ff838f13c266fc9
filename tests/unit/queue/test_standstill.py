"""A queue whose process or disk stood still hears its workers before it takes their leases for lost."""

from __future__ import annotations

import asyncio
import time

from services.queue.core.effects import Deliver, StopRun
from services.queue.core.messages import Claim, Renew, Tick, WorkerOpened
from services.telemetry import Telemetry
from tests.support.committing import committing
from tests.support.queueing import LEASE_NS
from tests.support.serving import serving, text


async def test_a_queue_that_was_stopped_for_longer_than_a_lease_hears_its_workers_first() -> None:
    async with serving(Telemetry(None)) as peer:
        peer.service.committer.machine.book._lease_ns = 10**9
        (name,) = await peer.submit(text())
        work = await peer.work()
        delivery = await work.claim(name)
        time.sleep(2.5)  # as SIGSTOP does, it stops the service's own loop
        assert (await work.complete(delivery.lease)).accepted


async def test_what_a_worker_said_while_the_disk_stood_still_is_heard_before_its_leases_are_looked_at() -> None:
    async with committing() as rig:
        acks = await rig.submit()
        await rig.settled(WorkerOpened(1, "w", "i", ()))
        await rig.settled(Claim(1, acks.acks[0][0]))
        (delivered,) = [effect for effect in rig.ear.effects if isinstance(effect, Deliver)]
        rig.store.writing.clear()
        rig.store.may_write.clear()
        stalled = rig.submit(40)
        while not rig.store.writing.is_set():
            await asyncio.sleep(0)
        rig.clock.pass_ns(LEASE_NS + 1)
        rig.committer.post(Tick())
        rig.committer.post(Renew(1, (delivered.lease,)))
        rig.store.may_write.set()
        await stalled
        await rig.settled(Tick())
        assert not [effect for effect in rig.ear.effects if isinstance(effect, StopRun)]
        assert rig.committer.machine.runs(delivered.lease.request_id, delivered.lease.attempt)
