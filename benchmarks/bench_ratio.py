"""The same requests through plain vLLM and through Penstock, alternating, on the same KV cache.

Usage: python -m benchmarks.bench_ratio [--requests 400] [--rounds 3] [--policy predictive]

Plain vLLM gets every request at once (what `vllm run-batch` does); Penstock gets the same file through
`penstock run-batch`. Both engines stay up; rounds alternate and swap who begins. Prints the ratio of
requests per second, Penstock over plain, with its spread, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import traces, workload
from benchmarks.options import POLICIES, count
from benchmarks.stack import FACTOR, MOST_OUTPUT, WINDOW_TOKENS, engine_flags, penstock, through_penstock


@contextmanager
def plain(flags: list[str]) -> Iterator[Any]:
    """Yield a function that runs a batch file through plain vLLM."""
    command = [sys.executable, "-m", "benchmarks.plain_vllm", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        answer(stdout)

        def run(path: Path) -> dict[str, Any]:
            stdin.write(f"{path}\n")
            stdin.flush()
            return answer(stdout)

        yield run
        stdin.close()


def answer(stdout: Any) -> dict[str, Any]:
    """Return the next JSON object of a stream, passing over anything else a library prints."""
    for line in stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise SystemExit("plain vLLM ended early")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=count, default=400)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--policy", choices=POLICIES, default="predictive")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(compare(Path(name), options.requests, options.rounds, options.policy)))


def compare(directory: Path, requests: int, rounds: int, policy: str) -> dict[str, Any]:
    """Alternate both sides; return ratios and counts."""
    model = directory / "model"
    penstock("tiny-model", str(model))
    lengths = traces.load(requests, FACTOR, WINDOW_TOKENS - MOST_OUTPUT, MOST_OUTPUT)
    print(f"workload: {lengths.source}; max_tokens {MOST_OUTPUT}, window {WINDOW_TOKENS}, policy {policy}")
    lines = workload.batch_lines(lengths, model / "tokenizer.json", MOST_OUTPUT)
    source = workload.write(lines, directory / "requests.jsonl")
    # Rounds repeat the same prompts: without this the later ones would find them in the prefix cache.
    flags = [*engine_flags(model), "--no-enable-prefix-caching"]
    sides: dict[str, list[dict[str, Any]]] = {"plain": [], "penstock": []}
    with plain(flags) as run_plain, through_penstock(directory, flags, policy) as run_penstock:
        runners = {"plain": run_plain, "penstock": run_penstock}
        for warm_up in runners.values():
            warm_up(source)
        for round_number in range(rounds):
            for side in list(runners)[:: 1 if round_number % 2 == 0 else -1]:
                sides[side].append(runners[side](source))
    return report(sides, policy)


def check_same_work(plain_run: dict[str, Any], penstock_run: dict[str, Any]) -> None:
    """Raise SystemExit unless Penstock completed every request, with as many tokens as plain vLLM."""
    outcomes, wanted = penstock_run["outcomes"], {"completed": plain_run["requests"]}
    if outcomes != wanted:
        raise SystemExit(f"penstock: the requests of a round ended as {outcomes}, not as {wanted}")
    tokens, plain_tokens = penstock_run["completion_tokens"], plain_run["completion_tokens"]
    if tokens != plain_tokens:
        raise SystemExit(f"penstock generated {tokens} tokens in a round, plain vLLM {plain_tokens}")


def report(sides: dict[str, list[dict[str, Any]]], policy: str) -> dict[str, Any]:
    """Print a table and return the closing JSON object; raises SystemExit if a round did not do the same work."""
    for plain_run, penstock_run in zip(sides["plain"], sides["penstock"], strict=True):
        check_same_work(plain_run, penstock_run)
    ratios = [
        (b["requests"] / b["elapsed_s"]) / (a["requests"] / a["elapsed_s"])
        for a, b in zip(sides["plain"], sides["penstock"], strict=True)
    ]
    print(f"{'side':10} {'preemptions':>12} {'KV usage':>9}")
    for side, runs in sides.items():
        preemptions = [run["preemptions"] for run in runs]
        print(f"{side:10} {statistics.mean(preemptions):12.1f} {statistics.mean(r['kv_usage'] for r in runs):9.2f}")
    median = statistics.median(ratios)
    print(
        f"requests/s, penstock over plain: {median:.2f} [{min(ratios):.2f}-{max(ratios):.2f}] over {len(ratios)} rounds"
    )
    return {
        "benchmark": "ratio",
        "policy": policy,
        "rps_ratio_vs_plain": round(median, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "preemptions": {side: [run["preemptions"] for run in runs] for side, runs in sides.items()},
        "kv_usage": {side: [round(run["kv_usage"], 3) for run in runs] for side, runs in sides.items()},
    }


if __name__ == "__main__":
    main()
