"""The whole path of a request between real processes, with an engine that answers at once.

Usage: python -m benchmarks.bench_lifecycle [--requests 20000] [--rounds 3] [--nats-server PROGRAM] [--parts compare,…]
       python -m benchmarks.bench_lifecycle --parts compare --only penstock,penstock-compiled   (after `make compiled`)

Durable submit, backlog, grant, claim, both ACKs, durable result, watch; 1 KiB prompts. The same lifecycle on Redis
Streams (every write synced) and NATS JetStream (as it comes, and synced) alternates with it: submit, claim by a worker
process, durable result, result seen by the client. These have no admission control, leases or cursors; they are the
floor, not a twin.

Then, for Penstock alone: how the figures grow with workers and with waiting requests, how well many workers are kept
full, and how long a lone request takes while another client submits as fast as it can. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lifecycle import report
from benchmarks.lifecycle.beside import beside_a_flood
from benchmarks.lifecycle.growth import Growth, by_waiting, by_workers, fleet_usage
from benchmarks.lifecycle.measure import alternate, opened_systems
from benchmarks.lifecycle.systems import NOTHING, PENSTOCK, PENSTOCK_COMPILED, SYSTEMS, slow_syncs
from benchmarks.options import count, each, some_of
from services.core import value
from services.scheduler.core.admission.policies import POLICIES

RUN_DIRECTORY = Path(".run")

COMPARED = "penstock,redis,nats,nats-synced"

WORKERS = (1, 8, 64, 512)
WAITING = (100, 1_000, 10_000, 150_000)

PARTS = ("compare", "workers", "waiting", "fleet", "beside")

PACE_PER_S = 5_000.0
"""Rate at which the scheduler's cost is stated."""

FLEET = Growth(workers=512, requests=147_456, requests_at_once=32, service_s=16.0)
"""288 requests per worker; each worker runs 32 at once, each for 16 s: 1,024 requests/s if no block is ever free."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=count, default=20_000, help="requests of one flood")
    parser.add_argument("--lone", type=count, default=300, help="lone requests per round")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--policy", choices=["", *POLICIES], default="", help="the scheduler's policy; empty means its default"
    )
    parser.add_argument("--nats-server", default="nats-server", help="program, of whichever version")
    parser.add_argument("--only", type=some_of(SYSTEMS), default=COMPARED, help="systems to compare")
    parser.add_argument("--workers", type=each(count), default=WORKERS, help="numbers of workers to compare")
    parser.add_argument("--waiting", type=each(count), default=WAITING, help="numbers of waiting requests to compare")
    parser.add_argument(
        "--sync-ms", type=count, default=0, help="in compare, how much longer each sync of our queue takes (by strace)"
    )
    parser.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="parts to run")
    options = parser.parse_args()
    if {PENSTOCK, PENSTOCK_COMPILED} <= set(options.only) and str(value.__file__).endswith(".so"):
        parser.error(
            "--only: penstock would be compiled as well; start this without build/compiled (COMPILED= of make)"
        )
    parts = options.parts
    answer: dict[str, Any] = {"benchmark": "lifecycle"}
    # Not the system's place for such things, which may be memory: syncing would cost nothing there.
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lifecycle-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        if "compare" in parts:
            under = {"queue": slow_syncs(options.sync_ms)} if options.sync_ms else NOTHING
            with opened_systems(directory, options.only, options.policy, options.nats_server, under) as systems:
                rounds = alternate(systems, options.requests, options.lone, options.rounds)
            answer.update(report.comparison(rounds, {system.name: system.note for system in systems}))
        if "workers" in parts:
            answer["workers"] = report.growth(
                "workers", by_workers(directory, options.workers, options.requests, options.lone, options.policy)
            )
        if "waiting" in parts:
            answer["waiting"] = report.growth(
                "waiting", by_waiting(directory, options.waiting, options.requests, PACE_PER_S, options.policy)
            )
        if "fleet" in parts:
            answer["fleet"] = report.usage(FLEET, fleet_usage(directory, FLEET, options.policy))
        if "beside" in parts:
            found = beside_a_flood(directory, options.requests, options.lone, options.rounds, options.policy)
            answer["beside"] = report.beside(found)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
