"""What a key costs: the queue's processor time per request, with a keys file and without.

Usage: python -m benchmarks.bench_keys [--requests 3000] [--rounds 5]

Two queues with stores of their own, one of them with a keys file of 10,000 keys and a tenant with a quota. A client
submits the same requests to both, one call each and 32 at a time, in alternating rounds; the first round of each is not
counted. Told are ratios of CPU time of the queue's process, keyed to open: [least, median, most]. Last line JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.lifecycle.processes import Child, python
from benchmarks.options import at_least, count
from penstock.client import Client
from penstock.keys import ApiKey, Role, digest, new_key

RUN_DIRECTORY = Path(".run")
KEYS = 10_000
"""In the file: a large platform's."""

LEAST_REQUESTS = 1000
"""Of a round. The kernel tells a process's time in hundredths of a second, and a hundred requests take about one."""

AT_ONCE = 32
LIMITS = "[tenants.acme]\nmax_waiting_requests = 100000000\nmax_waiting_bytes = 100000000000\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=at_least(LEAST_REQUESTS), default=3000, help="of one round")
    parser.add_argument("--rounds", type=count, default=5)
    options = parser.parse_args()
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keys-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        key = written_keys(directory / "keys.toml")
        queues = {kind: started(kind, directory) for kind in ("open", "keyed")}
        try:
            ratios = asyncio.run(compared(queues, key, options.requests, options.rounds))
        finally:
            for child, _ in queues.values():
                child.stop()
    spread = [round(value, 3) for value in (min(ratios), statistics.median(ratios), max(ratios))]
    print(f"queue CPU per request, keyed / open: {spread[1]} ({spread[0]} to {spread[2]})")
    print(json.dumps({"requests": options.requests, "rounds": options.rounds, "keys": KEYS, "cpu_ratio": spread}))


def written_keys(path: Path) -> str:
    """Write a keys file; return a key in it."""
    key = new_key("asked")
    made = [ApiKey(f"other-{n}", Role.CLIENT, f"tenant-{n % 100}", sha256=digest(str(n))) for n in range(KEYS - 1)]
    made.append(ApiKey("asked", Role.CLIENT, "acme", sha256=digest(key)))
    tables = [
        f'[keys.{k.key_id}]\nrole = "{k.role}"\ntenant = "{k.tenant}"\nsha256 = "{k.sha256.hex()}"\n' for k in made
    ]
    path.write_text(LIMITS + "\n".join(tables))
    return key


def started(kind: str, directory: Path) -> tuple[Child, str]:
    """Start a queue; return it and its address."""
    flags = ["--penstock-keys", str(directory / "keys.toml")] if kind == "keyed" else []
    command = python("services.queue", "--listen", "127.0.0.1:0", "--data-dir", str(directory / kind), *flags)
    child = Child(kind, command, directory / f"{kind}.log")
    return child, child.ready_on()


async def compared(queues: dict[str, tuple[Child, str]], key: str, requests: int, rounds: int) -> list[float]:
    """Return the ratio of each round after the first."""
    ratios = []
    for number in range(rounds + 1):
        used = {}
        for kind in ("open", "keyed") if number % 2 else ("keyed", "open"):
            child, address = queues[kind]
            before_s = child.cpu_s()[kind]
            async with Client(address, api_key=key) as client:
                await submitted(client, requests)
            used[kind] = child.cpu_s()[kind] - before_s
        if number:
            ratios.append(used["keyed"] / used["open"])
    return ratios


async def submitted(client: Client, requests: int) -> None:
    """Submit requests, AT_ONCE at a time, each by a call of its own."""
    left = iter(range(requests))

    async def submit() -> None:
        for number in left:
            await client.submit(prompt=f"request {number}", max_tokens=16)

    await asyncio.gather(*(submit() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    main()
