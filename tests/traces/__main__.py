"""10,000 requests while workers are killed, and the trace of every one: `python -m tests.traces`.

Real processes: queue, scheduler, gateway, workers with the simulated engine, and a receiver that takes their spans
over OTLP/gRPC, with the defaults of the services. Workers are killed with SIGKILL until 1 % of the requests have lost
an attempt. `verdict` says what each trace must be. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import penstock
from tests.support.fleet import Fleet, Service
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tests.support.web import asked
from tests.traces.receiver import written
from tests.traces.verdict import Kill, Sent, judge

WORKERS = ("w1", "w2", "w3")
WORKER_FLAGS = ["--engine", "simulated", "--served-model-name", "tiny", "--profile", "cpu-small",
                "--max-num-seqs", "16"]  # fmt: skip
MOST_TOKENS = 96
MOST_KILLS = 25
"""Of workers that run up to 16 requests each, where 1 % of 10,000 are to lose an attempt."""

CONCURRENCY = 96
"""Twice what the workers run at once: so that there is always a line."""

GATEWAY_SHARE = 20
"""One of so many requests comes through the gateway."""

COMPLETIONS = "/v1/completions"
FAULTS_SHOWN = 20


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class Load:
    """Clients that ask one after the other."""

    def __init__(self, fleet: Fleet, requests: int) -> None:
        """Ask `requests` times altogether."""
        self._gateway = fleet.services["gateway"].address
        self._queue = fleet.queue.address
        self._numbers = iter(range(requests))
        self.sent: list[Sent] = []
        """Those that were answered."""
        self.lost_attempts = 0

    async def run(self) -> None:
        """Return once every request is answered."""
        async with penstock.Client(self._queue) as client, asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(self._ask_on(client))

    async def _ask_on(self, client: penstock.Client) -> None:
        for number in self._numbers:
            tokens = 1 + number % MOST_TOKENS
            if number % GATEWAY_SHARE:
                request_id = await client.submit(prompt=f"number {number}", max_tokens=tokens, model="tiny")
                result = await client.result(request_id)
                self.lost_attempts += result.attempts - 1
                self.sent.append(Sent(request_id, "penstock.submit"))
            else:
                body = {"model": "tiny", "prompt": f"number {number}", "max_tokens": tokens}
                async with asked(self._gateway, "POST", COMPLETIONS, body) as response:
                    await response.json()
                    self.sent.append(Sent(response.headers["x-request-id"], "gateway.request"))


async def kill_workers(fleet: Fleet, load: Load, requests: int, wanted: int) -> list[Kill]:
    """Kill one worker after the other at even distances until so many attempts are lost; return the kills."""
    kills: list[Kill] = []
    step = requests // MOST_KILLS
    while load.lost_attempts < wanted and len(load.sent) < requests - step:
        goal = len(load.sent) + step
        while len(load.sent) < goal:
            await asyncio.sleep(0.02)
        name = WORKERS[len(kills) % len(WORKERS)]
        worker = fleet.services[f"worker-{name}"]
        worker.kill()
        kills.append(Kill(name, time.time_ns()))
        say(f"{len(load.sent)} answered, {load.lost_attempts} attempts lost; kill -9 of {name}")
        await asyncio.to_thread(worker.start)
    return kills


def start_receiver(directory: Path) -> tuple[subprocess.Popen[bytes], Path, dict[str, str]]:
    """Return the receiver's process, its file, and the variables that point an exporter at it."""
    port, path, log = free_port(), directory / "spans", directory / "receiver.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tests.traces.receiver", str(port), str(path)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    wait_for(lambda: b"ready" in log.read_bytes() or process.poll() is not None, "the receiver to be ready")
    assert process.poll() is None, log.read_text()
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    return process, path, endpoint


async def run(fleet: Fleet, requests: int, wanted: int) -> tuple[list[Sent], list[Kill]]:
    """Ask and kill; return what was sent and what was killed."""
    load = Load(fleet, requests)
    killing = asyncio.create_task(kill_workers(fleet, load, requests, wanted))
    await load.run()
    return load.sent, await killing


def stop(service: Service) -> None:
    """End a service so that it exports what it has."""
    status = service.stop(90)
    assert status == 0, f"{service.name}: status {status}\n{service.log()[-2000:]}"


def main() -> None:
    """Run everything, judge the traces, say what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    requests = parser.parse_args().requests
    with tempfile.TemporaryDirectory() as name:
        receiver, path, endpoint = start_receiver(Path(name))
        os.environ.update(endpoint)
        fleet = Fleet(Path(name) / "fleet")
        try:
            fleet.start_core()
            for worker in WORKERS:
                fleet.add_worker(worker, WORKER_FLAGS)
            fleet.add_gateway()
            sent, kills = asyncio.run(run(fleet, requests, requests // 100))
            for service in reversed(list(fleet.services.values())):
                stop(service)
        finally:
            fleet.close()
            receiver.terminate()
            receiver.wait(30)
        tally = judge(sent, written(path), kills)
    for fault in tally.faults[:FAULTS_SHOWN]:
        say(fault)
    found = {
        "requests": len(sent), "complete_traces": tally.traces, "whole": tally.whole, "struck": tally.struck,
        "retried": tally.retried, "lost_attempts": tally.lost_attempts, "kills": len(kills), "spans": tally.spans,
        "faults": len(tally.faults),
    }  # fmt: skip
    print(json.dumps(found))
    sys.exit(bool(tally.faults) or tally.traces != requests or tally.retried * 100 < requests)


if __name__ == "__main__":
    main()
