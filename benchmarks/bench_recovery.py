"""How soon Penstock works again after a kill -9: the queue by the size of its store, the scheduler, a worker.

Usage: python -m benchmarks.bench_recovery [--waiting 100,10000,1000000] [--rounds 3] [--parts queue,scheduler,worker]

Stores are built by the queue's own machine and store in synced batches, with 1 KiB prompts and idempotency keys, by a
process that is killed. Every figure is a time from the start of a process (or the kill of a worker), with the imports
of Python in it, on whatever machine this is; the slowest of the rounds counts. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import count, each, some_of
from benchmarks.recovery import fleet
from benchmarks.recovery.queue_restart import restarts

RUN_DIRECTORY = Path(".run")

PARTS = ("queue", "scheduler", "worker")

QUEUE_TARGET_S, REGRANT_TARGET_S, LOSS_TARGET_S = 5.0, 2.0, 3.0
"""What the project asks for: submits after a restart with a million waiting, grants after a restart, requests of a
lost worker running elsewhere (besides what loading a model takes)."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--waiting", type=each(count), default="100,10000,1000000", help="sizes of the store, in waiting requests"
    )
    parser.add_argument("--rounds", type=count, default=3, help="starts per size, and kills of scheduler and worker")
    parser.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="parts to run")
    options = parser.parse_args()
    parts = options.parts
    answer: dict[str, Any] = {"benchmark": "recovery"}
    # Not the system's place for such things, which may be memory: syncing would cost nothing there.
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        if "queue" in parts:
            found = restarts(directory, options.waiting, options.rounds)
            answer["queue"] = {str(waiting): worst(rows) for waiting, rows in found.items()}
            answer["queue_target_s"] = QUEUE_TARGET_S
        if "scheduler" in parts:
            answer["scheduler"] = worst([fleet.regrant(directory / f"regrant-{n}") for n in range(options.rounds)])
            answer["scheduler_target_s"] = REGRANT_TARGET_S
        if "worker" in parts:
            answer["worker"] = worst([fleet.loss(directory / f"loss-{n}") for n in range(options.rounds)])
            answer["worker_target_s"] = LOSS_TARGET_S
    print(json.dumps(answer))


def worst(rows: Sequence[Any]) -> dict[str, Any]:
    """Print the rows; return the largest and the median of each of their fields."""
    fields = rows[0]._fields
    for row in rows:
        print("  ".join(f"{field} {getattr(row, field):.2f}" for field in fields), flush=True)
    return {
        field: {
            "worst": round(max(getattr(row, field) for row in rows), 3),
            "median": round(statistics.median(getattr(row, field) for row in rows), 3),
        }
        for field in fields
    }


if __name__ == "__main__":
    main()
