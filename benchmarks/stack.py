"""A whole Penstock on real vLLM for benchmarks, as a user starts it: the `penstock` command, and the engine's flags.

Nothing here imports `services`: whoever does has chosen gRPC's I/O, also for the clients he starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BASE_PORT = 17410
"""Port of the queue that `through_penstock` starts; its scheduler's is ten above."""

WINDOW_TOKENS = 1024
"""`max_model_len` of the run."""

FACTOR = 0.2
"""Scales the trace to the window: its 99th percentile, 4142 + 601 tokens, becomes 949."""

MOST_OUTPUT = 200
"""The trace's longest output, 1,000 tokens, times FACTOR; every request asks for this as max_tokens."""

BLOCKS = 257
"""256 usable blocks of 32 tokens: eight whole windows, so that KV-cache blocks are what is scarce."""


def engine_flags(model: Path) -> list[str]:
    """Return the worker's engine arguments."""
    flags = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-model-len": str(WINDOW_TOKENS),
        "--block-size": "32",
        "--num-gpu-blocks-override": str(BLOCKS),
        "--logits-processors": "benchmarks.force_length:ForceLength",
    }
    return ["--enforce-eager", *(part for pair in flags.items() for part in pair)]


def penstock(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run the `penstock` command; raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "penstock", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})


@contextmanager
def through_penstock(directory: Path, flags: list[str], policy: str) -> Iterator[Any]:
    """Yield a function that runs a batch file through a running Penstock."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENSTOCK_SCHEDULER_POLICY": policy}
    command = [sys.executable, "-m", "penstock", "up", "--data-dir", str(directory / "data")]
    command += ["--base-port", str(BASE_PORT), *flags]
    with (directory / "up.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    rounds = 0

    def run(path: Path) -> dict[str, Any]:
        nonlocal rounds
        rounds += 1
        summary = directory / f"summary-{rounds}.json"
        penstock(
            "run-batch", "--fresh", "--queue", f"127.0.0.1:{BASE_PORT}", "--scheduler", f"127.0.0.1:{BASE_PORT + 10}",
            "--wait-s", "120", "-i", str(path), "-o", str(directory / f"out-{rounds}.jsonl"),
            "--summary-json", str(summary),
        )  # fmt: skip
        return dict(json.loads(summary.read_text()))

    try:
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
