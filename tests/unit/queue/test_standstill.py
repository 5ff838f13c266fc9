"""A queue whose process stood still hears its workers before it takes their leases for lost."""

from __future__ import annotations

import time

from services.telemetry import Telemetry
from tests.support.serving import serving, text


async def test_a_queue_that_was_stopped_for_longer_than_a_lease_hears_its_workers_first() -> None:
    async with serving(Telemetry(None)) as peer:
        peer.service.committer.machine.book._lease_ns = 10**9
        (name,) = await peer.submit(text())
        work = await peer.work()
        delivery = await work.claim(name)
        time.sleep(2.5)  # as SIGSTOP does, it stops the service's own loop
        assert (await work.complete(delivery.lease)).accepted
