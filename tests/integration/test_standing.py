"""Grants that stand ready, between real processes: requests meet them, also while the scheduler is away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from penstock import Outcome, RequestState, SyncClient
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_metrics import scrape
from tests.support.fleet import Fleet
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

USED = "penstock_scheduler_standing_grants_used_total"


def test_requests_that_come_alone_meet_grants_that_stand_ready(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    worker = fleet.add_worker("w1", SIMULATED_FLAGS)
    with SyncClient(fleet.queue.address, fleet.scheduler.address) as client:

        def answered() -> bool:
            for _ in range(10):
                assert client.generate(prompt="a lone one", max_tokens=2).outcome is Outcome.COMPLETED
            return scrape(fleet.scheduler).get(USED, 0) >= 5

        wait_for(answered, "some of them to be used")

        def met_without_a_scheduler() -> bool:
            """Whether a grant stood when the scheduler was killed: its offer may still have been on its way."""
            fleet.scheduler.kill()
            alone = client.submit(prompt="a lone one", max_tokens=2)
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: client.get(alone).state is RequestState.DONE, "its answer", timeout_s=2)
            met = client.get(alone).state is RequestState.DONE
            fleet.scheduler.start()
            assert client.result(alone).outcome is Outcome.COMPLETED
            wait_for(answered, "others to be used after a new start")
            return met

        assert any(met_without_a_scheduler() for _ in range(5)), "a grant still stands when the scheduler is gone"

        wait_for(lambda: client.drain_worker("w1") == 0, "what stood to be withdrawn")
        waits = client.submit(prompt="nobody may run it", max_tokens=2)
        assert client.get(waits).state is RequestState.READY, "nothing stands on a worker that has been told to drain"
        client.undrain_worker("w1")
        assert client.result(waits).outcome is Outcome.COMPLETED

    def at_home() -> bool:
        scheduler = scrape(fleet.scheduler)
        return scheduler["penstock_scheduler_free_blocks"] == scheduler["penstock_scheduler_capacity_blocks"]

    wait_for(at_home, "what stands unused to be recalled")
    assert scrape(fleet.scheduler)["penstock_scheduler_audit_violations_total"] == 0
    assert scrape(worker)["penstock_worker_audit_violations_total"] == 0
