"""Request lengths of a production trace, scaled to a small model's window.

The trace is the Azure LLM inference trace 2023, conversation (CC-BY 4.0; Patel et al., "Splitwise",
ISCA 2024). It is not part of this repository: put `azure_llm_2023_conversation.csv` into the directory
that PENSTOCK_TRACES names. Without it, lengths are drawn from log-normal distributions fitted to the
trace's published quantiles, and the report says so.
"""

from __future__ import annotations

import csv
import math
import os
import random
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path

FILE_NAME = "azure_llm_2023_conversation.csv"
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "shared" / "traces"

PROMPT_P50, PROMPT_P99, PROMPT_MOST = 1020, 4142, 14050
OUTPUT_P50, OUTPUT_P99, OUTPUT_MOST = 129, 601, 1000
"""Quantiles of the trace in tokens, for the fitted distributions."""

Z99 = 2.326
"""The 99th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of one request, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Workload:
    """Request lengths in order of arrival, and a sentence that says where they are from."""

    lengths: list[Lengths]
    source: str


def load(count: int, factor: float, most_prompt: int, most_output: int, seed: int = 0) -> Workload:
    """Return `count` lengths, each multiplied by `factor` and clipped to [1, most_…]; each seed has its own stretch."""
    path = Path(os.environ.get("PENSTOCK_TRACES", DEFAULT_DIRECTORY)) / FILE_NAME
    if path.is_file():
        raw, where = _read(path, count, seed * count), f"{count} requests of {FILE_NAME} from number {seed * count}"
    else:
        raw, where = (
            _draw(count, seed),
            f"log-normal lengths fitted to the trace's quantiles ({FILE_NAME} not found)",
        )
    scaled = [
        Lengths(_scaled(item.prompt, factor, most_prompt), _scaled(item.output, factor, most_output)) for item in raw
    ]
    return Workload(scaled, f"{where}, times {factor:g}, clipped at {most_prompt}+{most_output} tokens")


def _scaled(tokens: int, factor: float, most: int) -> int:
    return min(max(round(tokens * factor), 1), most)


def _read(path: Path, count: int, first: int) -> list[Lengths]:
    with path.open(newline="") as source:
        rows = csv.DictReader(source)
        found = [
            Lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in islice(rows, first, first + count)
        ]
    if len(found) < count:
        raise SystemExit(f"{path} has {len(found)} requests from number {first}, {count} are wanted")
    return found


def _draw(count: int, seed: int) -> list[Lengths]:
    rng = random.Random(seed)

    def lognormal(p50: int, p99: int, most: int) -> int:
        return min(round(rng.lognormvariate(math.log(p50), math.log(p99 / p50) / Z99)), most)

    return [
        Lengths(lognormal(PROMPT_P50, PROMPT_P99, PROMPT_MOST), lognormal(OUTPUT_P50, OUTPUT_P99, OUTPUT_MOST))
        for _ in range(count)
    ]


def moments_s(count: int, seed: int = 0) -> list[float]:
    """Return when the requests that `load` returns arrived, in seconds; Poisson without the trace."""
    path = Path(os.environ.get("PENSTOCK_TRACES", DEFAULT_DIRECTORY)) / FILE_NAME
    if path.is_file():
        with path.open(newline="") as source:
            rows = islice(csv.DictReader(source), seed * count, (seed + 1) * count)
            # The trace has seven decimals, one more than fromisoformat takes.
            return [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(1.0) for _ in range(count)))
