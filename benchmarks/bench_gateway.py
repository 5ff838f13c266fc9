"""`vllm bench serve` against the gateway and against vLLM's own OpenAI server, alternating, on the same KV cache.

Usage: python -m benchmarks.bench_gateway [--requests 300] [--rounds 4] [--sustained 0.5]
       [--model tiny]

Both servers stay up and get the same engine flags; rounds alternate and swap who begins, and both sides of a round get
the same random prompts at the same Poisson arrivals. First vLLM's own server is given everything at once: that is the
rate it can serve. Then `--sustained` of that rate is offered, and three times as much. The TTFT that the gateway adds
is printed in milliseconds, as its target is, and as a ratio. ITL is between chunks, of which one may carry several
tokens; TPOT is the time per token after the first. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import DTYPE, MODELS, make_model

BASE_PORT = 17510
GATEWAY_PORT = BASE_PORT + 5
PLAIN_PORT = 17600

START_S = 180
"""Longest wait for an engine; a first start compiles byte code for minutes."""

INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
"""Middle of the lengths; both vary by half of it."""

WINDOW_TOKENS = 1024

OVERLOAD = 3
"""Times the sustained rate."""

QUIET = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Load:
    """One run of vLLM's client."""

    requests: int
    rate: str
    """Requests per second, or `inf`."""
    seed: int


def engine_flags(model: Path) -> list[str]:
    """Return the engine arguments of both sides; without a prefix cache, so that no side finds a prompt again."""
    flags = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--dtype": DTYPE,
        "--max-model-len": str(WINDOW_TOKENS),
        "--block-size": "32",
        "--num-gpu-blocks-override": "513",
    }
    return ["--enforce-eager", "--no-enable-prefix-caching", *(part for pair in flags.items() for part in pair)]


@contextmanager
def server(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Run an OpenAI server until it is left; yield its base address. Raises SystemExit if it does not start."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env={**os.environ, **QUIET}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def client(base: str, model: Path, directory: Path) -> Callable[[Load], dict[str, Any]]:
    """Return a function that runs vLLM's client against `base` and returns what it measured."""

    def run(load: Load) -> dict[str, Any]:
        flags = {
            "--base-url": base,
            "--model": "tiny",
            "--tokenizer": str(model),
            "--dataset-name": "random",
            "--random-input-len": str(INPUT_TOKENS),
            "--random-output-len": str(OUTPUT_TOKENS),
            "--random-range-ratio": "0.5",
            "--num-prompts": str(load.requests),
            "--request-rate": load.rate,
            "--seed": str(load.seed),
            "--temperature": "0",
            "--result-dir": str(directory),
            "--result-filename": "result.json",
        }
        arguments = [
            "--ignore-eos",
            "--disable-tqdm",
            "--save-result",
            *(part for pair in flags.items() for part in pair),
        ]
        command = [sys.executable, "-m", "benchmarks.vllm_bench_serve", *arguments]
        with (directory / "client.log").open("ab") as out:
            subprocess.run(command, check=True, env={**os.environ, **QUIET}, stdout=out, stderr=out)
        return dict(json.loads((directory / "result.json").read_text()))

    return run


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, default=300, help="of a run at the sustained rate; three times that above"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sustained", type=float, default=0.5, help="offered, as a share of what vLLM can serve")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as name:
        print(json.dumps(compare(Path(name), options)))


def compare(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides at both rates; return ratios and counts."""
    model = directory / "model"
    make_model(model, options.model, WINDOW_TOKENS)
    flags = engine_flags(model)
    up = ["penstock", "up", "--data-dir", str(directory / "data"), "--base-port", str(BASE_PORT), *flags]
    plain = ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(PLAIN_PORT), *flags]
    with ExitStack() as stack:
        sides = {
            name: client(stack.enter_context(server(command, port, directory / f"{name}.log")), model, directory)
            for name, command, port in (("vllm", plain, PLAIN_PORT), ("gateway", up, GATEWAY_PORT))
        }
        for run in sides.values():
            run(Load(options.requests // 4, "inf", 1))
        most = sides["vllm"](Load(options.requests, "inf", 2))["request_throughput"]
        answer: dict[str, Any] = {"benchmark": "gateway", "sustained": options.sustained}
        for name, times in (("sustained", 1), ("overload", OVERLOAD)):
            rate = f"{most * options.sustained * times:.3f}"
            rounds = alternate(sides, options, rate, options.requests * times)
            answer[name] = report(name, rounds, options.requests * times)
    return answer


def alternate(
    sides: dict[str, Callable[[Load], dict[str, Any]]], options: argparse.Namespace, rate: str, requests: int
) -> dict[str, list[dict[str, Any]]]:
    """Run both sides in turn at one rate."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            rounds[name].append(sides[name](Load(requests, rate, 10 + number)))
    return rounds


def report(name: str, rounds: dict[str, list[dict[str, Any]]], requests: int) -> dict[str, Any]:
    """Print one rate's table and return it: each figure the median of the rounds with the lowest and highest."""
    pairs = list(zip(rounds["vllm"], rounds["gateway"], strict=True))
    failed = {side: sum(requests - run["completed"] for run in runs) for side, runs in rounds.items()}
    figures = {
        "throughput_ratio": [b["output_throughput"] / a["output_throughput"] for a, b in pairs],
        "p50_ttft_added_ms": [b["median_ttft_ms"] - a["median_ttft_ms"] for a, b in pairs],
        "p99_ttft_added_ms": [b["p99_ttft_ms"] - a["p99_ttft_ms"] for a, b in pairs],
        "p50_ttft_ratio": [b["median_ttft_ms"] / a["median_ttft_ms"] for a, b in pairs],
        "p99_ttft_ratio": [b["p99_ttft_ms"] / a["p99_ttft_ms"] for a, b in pairs],
        "p50_itl_ratio": [b["median_itl_ms"] / a["median_itl_ms"] for a, b in pairs],
        "p99_itl_ratio": [b["p99_itl_ms"] / a["p99_itl_ms"] for a, b in pairs],
        "p50_tpot_ratio": [b["median_tpot_ms"] / a["median_tpot_ms"] for a, b in pairs],
    }
    print(f"{name}: {requests} requests a run, failed {failed}")
    for figure, values in figures.items():
        print(f"  {figure:20} {statistics.median(values):8.3f} [{min(values):.3f} .. {max(values):.3f}]", flush=True)
    spread = {
        figure: [round(value, 3) for value in (statistics.median(values), min(values), max(values))]
        for figure, values in figures.items()
    }
    return {"requests": requests, "failed": failed, **spread}


if __name__ == "__main__":
    main()
