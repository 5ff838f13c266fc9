"""A short request beside a backlog of long outputs, on real vLLM: how much longer its answer takes than alone.

Usage: python -m benchmarks.bench_isolation [--rounds 3] [--seconds 20] [--backlog 1000]

The engine runs as the worker starts it (`priority`: what is within its channel's guarantee goes first) and, the ways
alternating and swapping who begins, with `--scheduling-policy fcfs`. Each time all services start anew, so that nothing
is known of output lengths. `interactive` (the default configuration's, guaranteed a tenth) asks for four tokens, again
and again: first alone, then for some seconds beside `batch`, whose outputs of 150 to 900 tokens are given a limit of
960. Prints the answers' times as multiples of the median alone, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.options import count
from benchmarks.stack import BASE_PORT, engine_flags, penstock, through_penstock
from penstock.sync_client import SyncClient

WAYS: dict[str, list[str]] = {"priority": [], "fcfs": ["--scheduling-policy", "fcfs"]}
ALONE = 40
"""Answers that are timed alone."""

PAUSE_S = 0.1
"""Between an answer and the next question."""

OUTPUTS, LIMIT = (150, 900), 960


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--seconds", type=count, default=20, help="beside the backlog, in each round")
    parser.add_argument("--backlog", type=count, default=1000, help="requests of `batch`, more than end in that time")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        penstock("tiny-model", str(model))
        for number in range(options.rounds):
            for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                directory = Path(name) / f"{way}-{number}"
                directory.mkdir()
                flags = [*engine_flags(model), *WAYS[way]]
                with through_penstock(directory, flags, "predictive"):
                    found[way].append(one_round(number, options.seconds, options.backlog))
                print(f"round {number}, {way}: {found[way][-1]}", flush=True)
    print(json.dumps({"benchmark": "isolation_on_vllm", **{way: summary(rounds) for way, rounds in found.items()}}))


def one_round(seed: int, seconds: float, backlog: int) -> dict[str, float]:
    """Return the times of answers beside the backlog, as multiples of the median alone."""
    with SyncClient(f"127.0.0.1:{BASE_PORT}", retry_for_s=120) as client:
        answer_s(client)
        alone_s = statistics.median(answer_s(client) for _ in range(ALONE))
        for ack in client.submit_many(long_outputs(random.Random(seed), backlog)):
            if ack.error is not None:
                raise SystemExit(f"a request of the backlog was refused: {ack.error}")
        began_s = time.monotonic()
        times = []
        while time.monotonic() - began_s < seconds:
            times.append(answer_s(client) / alone_s)
        waiting = sum(channel.ready for channel in client.stats().channels)
        client.cancel(batch="backlog")
        if not waiting:
            raise SystemExit("the backlog was over before the time was; ask for a larger --backlog")
    times.sort()
    return {
        "answers": len(times),
        "p50": round(times[len(times) // 2], 2),
        "p90": round(times[len(times) * 9 // 10], 2),
        "slowest": round(times[-1], 2),
    }


def answer_s(client: SyncClient) -> float:
    """Return how long a short answer took, in seconds; then pause."""
    began_s = time.monotonic()
    client.generate(prompt="the gate feeds the wheel", max_tokens=4, ignore_eos=True)
    took_s = time.monotonic() - began_s
    time.sleep(PAUSE_S)
    return took_s


def long_outputs(draw: random.Random, backlog: int) -> Iterator[Any]:
    """Yield the requests of `batch`; nobody but the engine knows how long their outputs will be."""
    for _ in range(backlog):
        fields = {"prompt": "a long story", "channel": "batch", "batch": "backlog", "max_tokens": LIMIT}
        yield {**fields, "extra_args": {"output_tokens": draw.randint(*OUTPUTS)}}


def summary(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return of each figure the median over the rounds, the least and the most."""
    by_name = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {name: [statistics.median(all_), min(all_), max(all_)] for name, all_ in by_name.items()}


if __name__ == "__main__":
    main()
