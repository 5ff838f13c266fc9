"""A large batch through the gateway's files and batches: what memory it takes there, phase by phase.

Usage: python -m benchmarks.bench_batch_files [--lines 150000] [--line-bytes 1400]

Real queue, scheduler and gateway, one worker with a simulated engine. The file is uploaded with the `openai` client,
made a batch, followed until it has ended, and its output is read in order of completion and, of as many lines as
`--in-order` says, of the input. The gateway's peak of each phase is the kernel's own (VmHWM), reset between phases, so
that nothing is missed between samples. Meanwhile a client asks twenty times a second for a path that is not there; its
times are told as multiples of the median when the gateway is idle: [median, 99th percentile]. Last line JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from benchmarks.gateway import ENDS, RUN_DIRECTORY, fleet, write_input
from benchmarks.options import at_least, count

LIMIT_MIB = 300
"""What the gateway may take at any moment."""

BLOCKS, SEQUENCES, STEP_TOKENS = 20_001, 256, 262_144
"""Of the simulated engine: room for what the queue gives it, so that it is not what is waited for."""

ENGINE = ["--max-num-seqs", str(SEQUENCES), "--num-gpu-blocks-override", str(BLOCKS)]
ENGINE += ["--max-num-batched-tokens", str(STEP_TOKENS)]

LEAST_LINE_BYTES = 150

POLL_S = 0.5
PROBE_S = 0.05
NOWHERE = "/v1/nowhere"
"""Answered by the gateway alone: what is measured is how long its loop keeps others waiting."""

IDLE_S = 5.0
RESET_PEAK = "5"
"""Written to clear_refs: VmHWM begins again at what is resident now (Linux, proc(5))."""


def main() -> None:
    """Run the benchmark; exit with 1 if the gateway took more than it may, or a line is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=count, default=150_000)
    parser.add_argument(
        "--line-bytes", type=at_least(LEAST_LINE_BYTES), default=1400, help="about so many bytes a line"
    )
    parser.add_argument("--in-order", type=at_least(0), default=2000, help="lines read in the order of the input")
    options = parser.parse_args()
    RUN_DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batch-files-", dir=RUN_DIRECTORY) as name:
        directory = Path(name).resolve()
        path = write_input(directory / "input.jsonl", options.lines, options.line_bytes)
        with fleet(directory, ENGINE) as (address, gateway):
            client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=3600, max_retries=0)
            probe = Probe(address)
            try:
                answer = _measure(client, Peak(gateway.process.pid, probe), path, options)
            finally:
                probe.stop()
    print(json.dumps({"benchmark": "batch_files", **answer}))
    if not (answer["within_limit"] and answer["every_line_once"]):
        raise SystemExit(1)


class Probe:
    """A client that asks a small question again and again, and notes how long each answer takes."""

    def __init__(self, address: str) -> None:
        """Ask the gateway at `address` until `stop`."""
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self._took_s: list[float] = []
        self._failed: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.wait(PROBE_S):
                began_s = time.monotonic()
                self._connection.request("GET", NOWHERE)
                self._connection.getresponse().read()
                self._took_s.append(time.monotonic() - began_s)
        except (OSError, http.client.HTTPException) as error:
            self._failed = error

    def take_s(self) -> tuple[float, float]:
        """Return median and 99th percentile since the last call; raises SystemExit once there was no answer."""
        if self._failed is not None:
            raise SystemExit(f"the gateway did not answer a small question: {self._failed!r}")
        took_s, self._took_s = sorted(self._took_s), []
        if not took_s:
            return 0.0, 0.0
        return took_s[len(took_s) // 2], took_s[len(took_s) * 99 // 100]

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()
        self._thread.join()
        self._connection.close()


class Peak:
    """The largest resident size of a process in a phase, in MiB, and what a small question takes meanwhile."""

    def __init__(self, pid: int, probe: Probe) -> None:
        """Look at the process `pid`, and take the times of `probe`."""
        self.waits: dict[str, tuple[float, float]] = {}
        self._probe = probe
        self._proc = Path("/proc") / str(pid)
        self.mib: dict[str, float] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Note the peak of what happens in the block."""
        (self._proc / "clear_refs").write_text(RESET_PEAK)
        self._probe.take_s()
        began_s = time.monotonic()
        yield
        self.waits[phase] = self._probe.take_s()
        status = (self._proc / "status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("VmHWM:"))
        self.mib[phase] = round(int(line.split()[1]) / 1024, 1)
        print(f"{phase:<12} {time.monotonic() - began_s:6.1f} s  gateway peak {self.mib[phase]} MiB", flush=True)


def _measure(client: openai.OpenAI, peak: Peak, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    with peak.of("idle"):
        time.sleep(IDLE_S)
    with peak.of("upload"), path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch_id = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h").id
    with peak.of("validating"):
        batch = _until(client, batch_id, {"in_progress", "finalizing", *ENDS})
    with peak.of("in_progress"):
        batch = _until(client, batch_id, ENDS)
    if batch.status != "completed" or batch.output_file_id is None:
        raise SystemExit(f"the batch ended as {batch.status}: {batch.errors}")
    ids: list[str] = []
    with peak.of("output"), client.files.with_streaming_response.content(batch.output_file_id) as response:
        ids += (json.loads(line)["custom_id"] for line in response.iter_lines())
    first: list[str] = []
    with (
        peak.of("input_order"),
        client.files.with_streaming_response.content(batch.output_file_id, extra_query={"order": "input"}) as response,
    ):
        lines = response.iter_lines()
        first += (json.loads(next(lines))["custom_id"] for _ in range(min(options.in_order, options.lines)))
    counts = batch.request_counts
    assert counts is not None
    return {
        "lines": options.lines,
        "file_mib": round(uploaded.bytes / 2**20, 1),
        "completed": counts.completed,
        "failed": counts.failed,
        "gateway_peak_mib": peak.mib,
        "probe_times_idle_median": {
            phase: [round(wait / peak.waits["idle"][0], 1) for wait in waits] for phase, waits in peak.waits.items()
        },
        "limit_mib": LIMIT_MIB,
        "within_limit": max(peak.mib.values()) <= LIMIT_MIB,
        "every_line_once": sorted(ids) == sorted(f"line-{number}" for number in range(options.lines)),
        "in_input_order": first == [f"line-{number}" for number in range(len(first))],
    }


def _until(client: openai.OpenAI, batch_id: str, wanted: set[str]) -> Any:
    while (batch := client.batches.retrieve(batch_id)).status not in wanted:
        time.sleep(POLL_S)
    return batch


if __name__ == "__main__":
    main()
