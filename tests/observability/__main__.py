"""Every query of dashboard and alerts, asked of a real Prometheus: `python -m tests.observability`.

Queue, scheduler, two simulated workers and a gateway run under load; a request is refused, a worker and the queue are
killed, so that what is counted only then is there too. Every query must be answered without an error and with a
number. Needs Debian's `prometheus`. The last line printed is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import penstock
from tests.observability.prometheus import Prometheus, promtool
from tests.support.fleet import Fleet
from tests.support.promql import OBSERVABILITY, alerts, compared, panel_queries
from tests.support.waiting import wait_for, wait_for_async
from tests.support.web import ask, asked

RULE_TESTS = sorted(str(path) for path in Path(__file__).parent.glob("*.test.yaml"))
WORKER_FLAGS = ["--engine", "simulated", "--served-model-name", "tiny", "--profile", "cpu-small"]
COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "the river", "max_tokens": 16}
ROUNDS, PAUSE_S = 90, 2.0
"""How often all queries are asked until each has a number: rates need a few scrapes after everything has happened."""

DOWN = 'up{job="penstock"} == 0'


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


async def load(fleet: Fleet) -> None:
    """Keep both channels and the gateway's stream busy, whatever is killed meanwhile, until cancelled."""
    async with penstock.Client(fleet.queue.address) as client:
        while True:
            with contextlib.suppress(penstock.PenstockError, OSError, asyncio.IncompleteReadError, ValueError):
                await asyncio.gather(
                    stream(fleet),
                    *(client.generate(prompt=f"{i}", max_tokens=32, channel="batch", model="tiny") for i in range(8)),
                )


async def stream(fleet: Fleet) -> None:
    """Read a stream of the gateway to its end."""
    async with asked(fleet.services["gateway"].address, "POST", COMPLETIONS, {**BODY, "stream": True}) as response:
        async for _ in response.events():
            pass


async def trouble(fleet: Fleet, prometheus: Prometheus) -> None:
    """Have counted what is counted only in trouble: a queue that is not there, a lost worker, a refusal."""
    worker, queue, gateway = fleet.services["worker-w2"], fleet.queue, fleet.services["gateway"].address

    async def refused() -> bool:
        status, _ = await ask(gateway, "POST", COMPLETIONS, BODY)
        return status >= 500

    say("kill -9 of the queue")
    queue.kill()
    await wait_for_async(refused, "the gateway to say that the queue is away", 120)
    await asyncio.to_thread(queue.start)
    say("kill -9 of a worker")
    async with penstock.Client(queue.address) as client:
        longs: list[str] = []

        async def on_the_worker() -> bool:
            found = [await client.get(long) for long in longs]
            if all(info.result is not None for info in found):  # the other worker may have come back first, and run all
                longs[:] = [
                    await client.submit(prompt="x", max_tokens=1000, ignore_eos=True, model="tiny") for _ in range(16)
                ]
            return any(info.worker_id == "w2" for info in found if info.result is None)

        await wait_for_async(on_the_worker, "a request to run on the worker", 120)
        worker.kill()
        await asyncio.to_thread(wait_for, lambda: prometheus.ask(DOWN), "the killed worker to be seen as down")
        await asyncio.to_thread(worker.start)
        await client.submit(prompt="for nobody", model="unknown-model")
        with contextlib.suppress(penstock.InvalidRequest):
            await client.submit(prompt="x", channel="no-such-channel")
    say("both are back")


def unanswered(prometheus: Prometheus, queries: dict[str, str]) -> list[str]:
    """Return the titles of the queries that have no number; raises AssertionError if one is refused."""
    return [
        title
        for title, query in queries.items()
        if not any(series["value"][1] != "NaN" for series in prometheus.ask(query))
    ]


async def run(fleet: Fleet, prometheus: Prometheus) -> dict[str, int]:
    """Return what was asked; raises if a query is refused or never has a number."""
    queries = {f"panel {title}: {query}": query for title, query in panel_queries()}
    for alert in alerts():
        prometheus.ask(alert.query)
        # Of what was some minutes ago there is nothing yet: it is asked for as it is now.
        parts = [re.sub(r" offset \w+", "", query) for query in compared(alert.query)]
        queries |= {f"alert {alert.name}: {query}": query for query in parts}
    loading = asyncio.create_task(load(fleet))
    try:
        await trouble(fleet, prometheus)
        for _ in range(ROUNDS):
            missing = await asyncio.to_thread(unanswered, prometheus, queries)
            assert not loading.done(), loading.exception()
            if not missing:
                break
            await asyncio.sleep(PAUSE_S)
        assert not missing, "without a number:\n" + "\n".join(missing)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    assert not (broken := prometheus.broken_rules()), broken
    return {"panel_queries": len(panel_queries()), "alerts": len(alerts()), "queries_answered": len(queries)}


def main() -> None:
    """Check the rules, start everything, ask, stop everything."""
    if not (shutil.which("prometheus") and shutil.which("promtool")):
        sys.exit("needs prometheus and promtool: apt-get install prometheus")
    say(promtool("check", "rules", str(OBSERVABILITY / "alerts.yaml")).strip())
    say(promtool("test", "rules", *RULE_TESTS).strip())
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory) / "fleet")
        try:
            fleet.start_core()
            for name in ("w1", "w2"):
                fleet.add_worker(name, WORKER_FLAGS)
            fleet.add_gateway()
            targets = {name: service.metrics_address for name, service in fleet.services.items()}
            with Prometheus(Path(directory) / "prometheus", targets) as prometheus:
                found = asyncio.run(run(fleet, prometheus))
        finally:
            fleet.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
