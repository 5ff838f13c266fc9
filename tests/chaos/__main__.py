"""Chaos: `python -m tests.chaos --seed 1` (real vLLM), `--engine simulated` (100,000 requests), `--short` (a test)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.engines import SIMULATED, SLOW, VLLM
from tests.chaos.run import Options, run
from tests.chaos.schedule import EXTENDED, FULL, SHORT


def narrator() -> Callable[[str], None]:
    """Return what prints a line with the seconds since now."""
    began_s = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began_s:6.1f} s  {text}", flush=True)


def options() -> Options:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser("tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule of faults")
    parser.add_argument("--engine", choices=["vllm", "simulated"], default="vllm")
    parser.add_argument("--requests", type=line_count, help="lines of the batch")
    parser.add_argument("--short", action="store_true", help="a simulated run of half a minute with eight kills")
    parser.add_argument("--directory", type=Path, default=Path(".run/chaos"), help="inputs, outputs, logs, the model")
    found = parser.parse_args()
    kind = "short" if found.short else found.engine
    engine, rows = {"vllm": (VLLM, FULL), "simulated": (SIMULATED, EXTENDED), "short": (SLOW, SHORT)}[kind]
    requests = engine.requests if found.requests is None else found.requests
    directory = found.directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--directory {directory}: {error.strerror}")
    if not os.access(directory, os.W_OK):
        parser.error(f"--directory {directory}: cannot be written to")
    return Options(found.seed, engine, requests, directory, rows, narrator())


def line_count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> int:
    """Run; the last line printed is JSON; return 1 if a promise was broken."""
    report, kept = asyncio.run(run(options()))
    print(json.dumps(report))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
