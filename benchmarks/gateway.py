"""A gateway before a simulated engine for benchmarks, and what is asked of a gateway: files, batches and streams."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lifecycle.processes import Child

RUN_DIRECTORY = Path(".run")
"""Not the system's place for such things, which may be memory: syncing would cost nothing there."""

AROUND_PROMPT_BYTES = 120
"""Of a line, about."""

ENDS = {"completed", "failed", "expired", "cancelled"}
"""How a batch can end."""

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the gate feeds the wheel",
    "max_tokens": 2,
    "ignore_eos": True,
    "stream": True,
}
"""Of a stream that is asked for one after the other."""


def write_input(path: Path, lines: int, line_bytes: int) -> Path:
    """Write a batch file of short completions with long prompts."""
    with path.open("w") as file:
        for number in range(lines):
            prompt = f"{number} " + "river gate water " * (line_bytes // 17)
            body = {"model": "tiny", "prompt": prompt[: line_bytes - AROUND_PROMPT_BYTES], "max_tokens": 1}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


@contextmanager
def fleet(directory: Path, engine: Sequence[str]) -> Iterator[tuple[str, Child]]:
    """Yield the gateway's address and process, before a simulated engine; all processes end with the block."""
    children: list[Child] = []

    def start(name: str, *flags: str) -> str:
        command = [sys.executable, "-m", f"services.{name}", "--listen", "127.0.0.1:0", *flags]
        children.append(Child(name, command, directory / f"{name}.log"))
        return children[-1].ready_on()

    try:
        queue = start("queue", "--data-dir", str(directory / "queue"))
        scheduler = start("scheduler", "--queue-address", queue)
        both = ["--queue-address", queue, "--scheduler-address", scheduler]
        start("worker", "--worker-id", "w1", *both, "--engine", "simulated", "--served-model-name", "tiny", *engine)
        yield start("gateway", *both), children[-1]
    finally:
        for child in reversed(children):
            child.stop()


def first_byte_s(address: str, body: dict[str, Any] = BODY) -> float:
    """Return how long the first token of a streamed completion took to come, in seconds; the stream is read out."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    try:
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
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
