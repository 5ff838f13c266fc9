"""Instructions that a request takes of each service: the same on a busy machine as on a quiet one, unlike time.

Usage: python -m benchmarks.bench_instructions [--services queue,scheduler,worker,client] [--requests 2000]
       (Debian: valgrind)

One service after the other runs under callgrind, which makes it about fifty times slower, while the lifecycle
benchmark's client floods the stack. What happens by the clock, ticks and audits, weighs that much more than it does
without, and the more the slower the machine is; how many messages share a frame is not quite the same each time. Of
the same machine in the same hour differences below 2 % mean nothing. The files are left in build/instructions;
`callgrind_annotate --inclusive=yes` shows where they go. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.lifecycle.processes import Child
from benchmarks.lifecycle.systems import FleetShape, penstock
from benchmarks.options import POLICIES, count, some_of

SERVICES = ("queue", "scheduler", "worker", "client")
OUT = Path("build/instructions")
RUN_DIRECTORY = Path(".run")

WARM_UP_REQUESTS = 500
"""So that what is counted is a request's way, and nothing that is made at the first one."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=some_of(SERVICES), default=",".join(SERVICES), help="what to count in")
    parser.add_argument("--requests", type=count, default=2_000)
    parser.add_argument("--policy", choices=POLICIES, default="predictive")
    options = parser.parse_args()
    for program in ("valgrind", "callgrind_control"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed (Debian: apt-get install valgrind)")
    RUN_DIRECTORY.mkdir(exist_ok=True)
    found = {}
    for service in options.services:
        found[service] = round(counted(service, options.requests, options.policy))
        print(f"{service:10} {found[service]:9,} instructions per request", flush=True)
    print(json.dumps({"benchmark": "instructions", "policy": options.policy, "per_request": found}))


def counted(service: str, requests: int, policy: str) -> float:
    """Return the instructions per request of one service, its child processes not included."""
    out = OUT / service
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    file = out.resolve() / "callgrind"
    under = {service: ("valgrind", "--tool=callgrind", f"--callgrind-out-file={file}")}
    with (
        tempfile.TemporaryDirectory(prefix="instructions-", dir=RUN_DIRECTORY) as directory,
        penstock(Path(directory).resolve() / "penstock", FleetShape(), policy, under=under) as system,
    ):
        system.client.ask(do="flood", requests=WARM_UP_REQUESTS)
        (watched,) = (child for child in system.children if child.name == service)
        _control(watched, "--zero")
        system.client.ask(do="flood", requests=requests)
        _control(watched, "--dump")
    return _total(file.with_name("callgrind.1")) / requests


def _control(child: Child, order: str) -> None:
    """Have callgrind start to count anew, or write what it counted."""
    subprocess.run(["callgrind_control", order, str(child.process.pid)], check=True, capture_output=True)


def _total(dump: Path) -> int:
    """Return the instructions in a file of callgrind's."""
    for line in dump.open(errors="replace"):
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise SystemExit(f"{dump} has no totals")


if __name__ == "__main__":
    main()
