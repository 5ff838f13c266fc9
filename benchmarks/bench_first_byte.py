"""The first byte of an interactive stream, alone and while a large batch is read, submitted and answered.

Usage: python -m benchmarks.bench_first_byte [--rounds 5] [--streams 40] [--lines 20000]

Real queue, scheduler and gateway, one worker with a simulated engine that takes a small CPU engine's time for its steps
and runs sixteen sequences at once. A round asks for streams one after the other: first with nothing else to do, then
from the moment a batch is created, while its lines are validated, and then while they are submitted and answered and
those that cannot run yet wait. The time is from the question to the first byte of the first token. Each round gives,
for each of the two phases, the median and the slowest as multiples of those alone; the last line, JSON, has for each
the median over the rounds, the least and the most. In the second phase the engine is full: its longer steps are in the
ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import openai

from benchmarks.gateway import ENDS, RUN_DIRECTORY, first_byte_s, fleet, write_input
from benchmarks.options import count

ENGINE = ["--profile", "cpu-tiny", "--max-num-seqs", "16", "--num-gpu-blocks-override", "2001"]
LINE_BYTES = 300
PHASES = ("validating", "in_progress")
"""Of a batch: its lines are only read; they are submitted, wait, and fill the engine."""

POLL_S = 0.1


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--streams", type=count, default=40, help="alone, and beside the batch that runs")
    parser.add_argument("--lines", type=count, default=20_000, help="of the batch")
    options = parser.parse_args()
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first-byte-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        path = write_input(directory / "input.jsonl", options.lines, LINE_BYTES)
        with fleet(directory, ENGINE) as (address, _):
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=600, max_retries=0)
            first_byte_s(address)
            rounds = [_round(client, address, path, options.streams) for _ in range(options.rounds)]
    answer: dict[str, Any] = {"benchmark": "first_byte", "lines": options.lines, "rounds": len(rounds)}
    for phase, which in product(PHASES, ("ratio_p50", "ratio_slowest")):
        ratios = [one[phase][which] for one in rounds]
        answer[f"{phase}_{which}"] = [round(statistics.median(ratios), 2), min(ratios), max(ratios)]
    print(json.dumps(answer))


def _round(client: openai.OpenAI, address: str, path: Path, streams: int) -> dict[str, Any]:
    alone_s = [first_byte_s(address) for _ in range(streams)]
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    created = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    beside_s: dict[str, list[float]] = {phase: [] for phase in PHASES}
    while len(beside_s[PHASES[-1]]) < streams:
        batch = client.batches.retrieve(created.id)
        if batch.status not in beside_s:
            raise SystemExit(f"the batch was {batch.status} before the streams had ended; ask for more --lines")
        beside_s[batch.status].append(first_byte_s(address))
    if not beside_s[PHASES[0]]:
        raise SystemExit("the batch was validated before a stream began; ask for more --lines")
    client.batches.cancel(created.id)
    while (batch := client.batches.retrieve(created.id)).status not in ENDS:
        time.sleep(POLL_S)
    found: dict[str, Any] = {"lines_answered": batch.request_counts.completed if batch.request_counts else 0}
    for phase, took_s in beside_s.items():
        found[phase] = {
            "streams": len(took_s),
            "ratio_p50": round(statistics.median(took_s) / statistics.median(alone_s), 2),
            # Of a few dozen there is no telling the 99th percentile.
            "ratio_slowest": round(max(took_s) / max(alone_s), 2),
        }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
