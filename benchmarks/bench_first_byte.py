"""The first byte of an interactive stream, alone and while a large batch is read, submitted and answered.

Usage: python -m benchmarks.bench_first_byte [--rounds 5] [--streams 40] [--lines 20000]

Real queue, scheduler and gateway, one worker with a simulated engine that takes a small CPU engine's time for its steps
and runs sixteen sequences at once. A round asks for streams one after the other, each for sixteen tokens: first with
nothing else to do, then from the moment a batch is created, while its lines are validated, submitted and answered, and
those that cannot run yet wait. The time is from the connection's first byte out to the first byte of the first token
in. Each round gives the ratios of median and 99th percentile; the last line, JSON, has their medians, least and most.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from benchmarks.bench_batch_files import ENDS, RUN_DIRECTORY, fleet, write_input

ENGINE = ["--profile", "cpu-tiny", "--max-num-seqs", "16", "--num-gpu-blocks-override", "2001"]
LINE_BYTES = 300
BODY = {"model": "tiny", "prompt": "the gate feeds the wheel", "max_tokens": 16, "ignore_eos": True, "stream": True}
POLL_S = 0.1


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=40, help="in each half of a round")
    parser.add_argument("--lines", type=int, default=20_000, help="of the batch")
    options = parser.parse_args()
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first-byte-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        path = write_input(directory / "input.jsonl", options.lines, LINE_BYTES)
        with fleet(directory, ENGINE) as (address, _):
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=600, max_retries=0)
            first_byte_s(address)
            rounds = [_round(client, address, path, options.streams) for _ in range(options.rounds)]
    answer = {"benchmark": "first_byte", "lines": options.lines, "rounds": rounds}
    for which in ("p50", "p99"):
        ratios = [one[f"ratio_{which}"] for one in rounds]
        answer[f"ratio_{which}"] = [round(statistics.median(ratios), 2), min(ratios), max(ratios)]
    print(json.dumps(answer))


def _round(client: openai.OpenAI, address: str, path: Path, streams: int) -> dict[str, Any]:
    alone_s = [first_byte_s(address) for _ in range(streams)]
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    created = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
    beside_s: list[float] = []
    statuses: set[str] = set()
    while len(beside_s) < streams or "in_progress" not in statuses:
        batch = client.batches.retrieve(created.id)
        statuses.add(batch.status)
        if batch.status in ENDS:
            raise SystemExit(f"the batch ended as {batch.status} before the streams did; ask for more --lines")
        beside_s.append(first_byte_s(address))
    client.batches.cancel(created.id)
    while (batch := client.batches.retrieve(created.id)).status not in ENDS:
        time.sleep(POLL_S)
    answered = batch.request_counts.completed if batch.request_counts else 0
    found = {
        "ratio_p50": round(_at(beside_s, 0.5) / _at(alone_s, 0.5), 2),
        "ratio_p99": round(_at(beside_s, 0.99) / _at(alone_s, 0.99), 2),
        "streams_beside": len(beside_s),
        "lines_answered": answered,
        "statuses": sorted(statuses),
    }
    print(json.dumps(found), flush=True)
    return found


def first_byte_s(address: str) -> float:
    """Return how long a stream's first token took to come, in seconds."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    try:
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"a stream was answered with {response.status}")
        line = response.readline()
        while not line.startswith(b"data: "):  # comments keep a silent stream alive
            line = response.readline()
        took_s = time.monotonic() - began_s
        response.read()
        return took_s
    finally:
        connection.close()


def _at(values: list[float], quantile: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * quantile))]


if __name__ == "__main__":
    main()
