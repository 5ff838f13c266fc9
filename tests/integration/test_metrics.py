"""What the metrics endpoints say of a run, and that docs/observability.md lists every metric."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import penstock as public
from tests.integration.conftest import SIMULATED_FLAGS
from tests.support.fleet import Fleet, Service
from tests.support.promql import PAGE, ROW, documented
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

REQUESTS = 20


def samples(service: Service) -> Iterator[Sample]:
    """Yield every sample of the service's metrics."""
    with urllib.request.urlopen(f"http://{service.metrics_address}/metrics") as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


def scrape(service: Service) -> dict[str, float]:
    """Return every sample of our own, summed over labels; names as Prometheus stores them."""
    values: dict[str, float] = {}
    for sample in samples(service):
        if sample.name.startswith("penstock_"):
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def families(service: Service) -> set[str]:
    """Return the names of our metric families, counters with their `_total`."""
    with urllib.request.urlopen(f"http://{service.metrics_address}/metrics") as answer:
        text = answer.read().decode()
    found = text_string_to_metric_families(text)
    return {f.name + ("_total" if f.type == "counter" else "") for f in found if f.name.startswith("penstock_")}


async def ask(fleet: Fleet) -> None:
    """Run some requests to their ends, one of them watched."""
    async with public.Client(fleet.queue.address) as client:
        for i in range(REQUESTS):
            await client.submit(prompt=f"number {i}", max_tokens=8, batch="m", channel="batch")
        ended = 0
        async for _ in client.watch(batch="m"):
            ended += 1
            if ended == REQUESTS:
                return


def tell_what_waits_in_vain(fleet: Fleet) -> None:
    """The age that alerts judge is not that of a request for a model nobody serves, unless no scheduler says so."""
    ages = "penstock_queue_oldest_ready_age_seconds", "penstock_queue_oldest_servable_age_seconds"

    def waits(servable: bool) -> Callable[[], bool]:
        return lambda: [scrape(fleet.queue)[age] > 0 for age in ages] == [True, servable]

    with public.SyncClient(fleet.queue.address) as client:
        misspelt = client.submit(prompt="for nobody", channel="batch", model="tinny")
        wait_for(waits(False), "what waits in vain to be told apart")
        fleet.scheduler.kill()
        wait_for(waits(True), "it to count where no scheduler says what is served")
        client.cancel(misspelt)


def test_the_metrics_tell_what_happened_and_are_documented(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    with public.SyncClient(fleet.queue.address) as client:
        client.cancel(client.submit(prompt="nobody wants this", channel="batch"))  # no end that a latency is told of
    worker = fleet.add_worker("w1", SIMULATED_FLAGS)
    asyncio.run(ask(fleet))

    def settled() -> bool:
        # Gauges are refreshed by the services' ticks, not by the scrape.
        queue, scheduler = scrape(fleet.queue), scrape(fleet.scheduler)
        return (
            scheduler.get("penstock_scheduler_grants_total") == REQUESTS
            and scheduler["penstock_scheduler_free_blocks"] == scheduler["penstock_scheduler_capacity_blocks"]
            and scheduler["penstock_scheduler_drift_blocks"] == 0
            and queue["penstock_queue_ready_requests"] == queue["penstock_queue_leased_requests"] == 0
        )

    wait_for(settled, "every credit to be home and every line to be empty")
    queue = scrape(fleet.queue)
    assert queue["penstock_queue_accepted_total"] == REQUESTS + 1
    assert queue["penstock_queue_ended_total"] == REQUESTS + 1
    assert queue["penstock_queue_e2e_seconds_count"] == REQUESTS
    assert queue["penstock_queue_audit_violations_total"] == 0
    scheduler = scrape(fleet.scheduler)
    assert scheduler["penstock_scheduler_audit_violations_total"] == 0
    assert scheduler["penstock_scheduler_refunded_blocks_total"] > 0

    engine = scrape(worker)
    assert engine["penstock_worker_time_to_first_token_seconds_count"] == REQUESTS
    assert engine["penstock_worker_generation_tokens_total"] > 0
    assert engine["penstock_worker_audit_violations_total"] == 0

    gateway = fleet.add_gateway()
    everyone = (fleet.queue, fleet.scheduler, worker, gateway)
    listed = {match[0] for match in ROW.findall(PAGE.read_text())}
    assert listed == {name for service in everyone for name in families(service)}

    # What dashboard and alerts may ask for is what the page lists (tests/tidy/test_observability.py).
    known = documented()
    labels = {sample.name: frozenset(sample.labels) for service in everyone for sample in samples(service)}
    assert len(labels.keys() & known.keys()) > len(known) / 2
    assert {name: known[name] for name in labels if name in known} == {n: labels[n] for n in labels if n in known}
    tell_what_waits_in_vain(fleet)
