"""The main job at size: 2,000 requests with production lengths through queue, scheduler and real vLLM.

Usage: python -m benchmarks.bench_main [--requests 2000] [--policy virtual-channels] [--workers 1]

Prints what `penstock run-batch` prints, then checks that every line has one answer, and ends with one JSON line. The
exit status is 1 if requests failed or were answered with another length than their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import traces, workload
from benchmarks.options import POLICIES, count
from benchmarks.stack import FACTOR, MOST_OUTPUT, WINDOW_TOKENS, engine_flags, penstock


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=count, default=2000)
    parser.add_argument("--policy", choices=POLICIES, default="virtual-channels")
    parser.add_argument("--workers", type=count, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = run(Path(name), options.requests, options.policy, options.workers)
    print(json.dumps(found), flush=True)
    accept(found, options.requests)


def run(directory: Path, requests: int, policy: str, workers: int) -> dict[str, Any]:
    """Run the job once below `directory`; return its summary."""
    model = directory / "model"
    penstock("tiny-model", str(model))
    lengths = traces.load(requests, FACTOR, WINDOW_TOKENS - MOST_OUTPUT, MOST_OUTPUT)
    print(f"workload: {lengths.source}; max_tokens {MOST_OUTPUT}, window {WINDOW_TOKENS}, policy {policy}")
    source = workload.write(
        workload.batch_lines(lengths, model / "tokenizer.json", MOST_OUTPUT), directory / "requests.jsonl"
    )
    output, summary_file = directory / "results.jsonl", directory / "summary.json"
    penstock(
        "run-batch", "--up", "--workers", str(workers), "--data-dir", str(directory / "data"), "-i", str(source),
        "-o", str(output), "--summary-json", str(summary_file), *engine_flags(model),
        environment={"PENSTOCK_SCHEDULER_POLICY": policy},
    )  # fmt: skip
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == [f"request-{i}" for i in range(requests)], "a line is lost or repeated"
    failed = [a for a in answers if a["error"] is not None]
    wrong_length = sum(
        a["response"]["body"]["usage"]["completion_tokens"] != min(length.output, MOST_OUTPUT)
        for a, length in zip(answers, lengths.lengths, strict=True)
        if a["error"] is None
    )
    summary = dict(json.loads(summary_file.read_text()))
    return {"benchmark": "main", "policy": policy, "failed": len(failed), "wrong_length": wrong_length, **summary}


def accept(found: dict[str, Any], requests: int) -> None:
    """Raise SystemExit unless every request completed, with as many tokens as it was to have."""
    if found["failed"] or found["wrong_length"]:
        wrong = f"{found['wrong_length']} have another length than they should"
        raise SystemExit(f"{found['failed']} of {requests} requests failed; of the others {wrong}")


if __name__ == "__main__":
    main()
