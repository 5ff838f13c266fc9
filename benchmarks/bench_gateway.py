"""`vllm bench serve` against the gateway and against vLLM's own OpenAI server, alternating, on the same KV cache.

Usage: python -m benchmarks.bench_gateway [--requests 300] [--rounds 4] [--sustained 0.5] [--alone 100]
       [--models m512 tiny]

Both servers stay up and get the same engine flags; rounds alternate and swap who begins, and both sides of a round get
the same random prompts at the same Poisson arrivals. First both are asked for one stream at a time, some in a row, then
the other: each begins when the other's processes rest (vLLM's poll for a second after their last request). Then
vLLM's own server is given everything at once: that is the rate it can serve. `--sustained` of that rate is offered, and
three times as much. The TTFT that the gateway adds is printed in milliseconds, as its target is, and as a ratio. ITL is
between chunks, of which one may carry several tokens; TPOT is the time per token after the first. Last line JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from benchmarks.devices import CPU
from benchmarks.gateway import first_byte_s
from benchmarks.models import MODELS, make_model
from benchmarks.options import above, at_least, count

BASE_PORT = 17510
GATEWAY_PORT = BASE_PORT + 5
PLAIN_PORT = 17600

START_S = 180
"""Longest wait for an engine; a first start compiles byte code for minutes."""

INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
"""Middle of the lengths; both vary by half of it."""

WINDOW_TOKENS = 1024

WARM_UP = 4
"""A warm-up has so many times fewer requests than a run."""

OVERLOAD = 3
"""Times the sustained rate."""

ALONE_TOKENS = 8
"""Of a stream that is asked for alone; only its first token is looked at."""

ALONE_ROW = 10
"""Streams in a row for one side, one at a time, before the other has its turn."""

REST_LOOK_S, REST_SHARE, REST_MOST_S = 0.2, 0.15, 30.0
"""Processes rest when they take less than this share of a processor, over a look of this length; and the longest wait
for that."""

QUIET = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
         "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
"""The last one has vLLM's server run the model in the engine core's process, as Penstock's worker does: otherwise, on
a CPU, the executor is one more process, with a reader that spins."""


HERE = sorted(name for name, model in MODELS.items() if model.device is CPU)
"""Models whose engine both sides can be given."""


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
        "--dtype": CPU.dtype,
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
        result = dict(json.loads((directory / "result.json").read_text()))
        if result["completed"] != load.requests:
            raise SystemExit(f"{base} completed {result['completed']} of {load.requests} requests")
        return result

    return run


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=at_least(WARM_UP), default=300, help="of a run at the sustained rate; three times that above"
    )
    parser.add_argument("--rounds", type=count, default=4)
    parser.add_argument("--sustained", type=above(0), default=0.5, help="offered, as a share of what vLLM can serve")
    parser.add_argument("--alone", type=at_least(0), default=100, help="streams of a round, one at a time; 0 for none")
    parser.add_argument("--models", nargs="+", choices=HERE, default=["m512", "tiny"])
    options = parser.parse_args()
    answer: dict[str, Any] = {"benchmark": "gateway", "sustained": options.sustained, "models": {}}
    for model in dict.fromkeys(options.models):
        with tempfile.TemporaryDirectory(prefix="bench-gateway-") as name:
            answer["models"][model] = compare(Path(name), model, options)
    print(json.dumps(answer))


def compare(directory: Path, model_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides with a model, alone and at both rates; return ratios and counts."""
    model = directory / "model"
    make_model(model, model_name, WINDOW_TOKENS)
    flags = engine_flags(model)
    up = ["penstock", "up", "--data-dir", str(directory / "data"), "--base-port", str(BASE_PORT), *flags]
    plain = ["vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(PLAIN_PORT), *flags]
    with ExitStack() as stack:
        sides = {
            name: client(stack.enter_context(server(command, port, directory / f"{name}.log")), model, directory)
            for name, command, port in (("vllm", plain, PLAIN_PORT), ("gateway", up, GATEWAY_PORT))
        }
        for run in sides.values():
            run(Load(options.requests // WARM_UP, "inf", 1))
        most = sides["vllm"](Load(options.requests, "inf", 2))["request_throughput"]
        print(f"model {model_name}")
        answer = {}
        if options.alone:
            answer["alone"] = report_alone([alone(options.alone, number) for number in range(options.rounds)])
        for name, times in (("sustained", 1), ("overload", OVERLOAD)):
            rate = f"{most * options.sustained * times:.3f}"
            rounds = alternate(sides, options, rate, options.requests * times)
            answer[name] = report(name, rounds, options.requests * times)
    return answer


def alone(streams: int, seed: int) -> dict[str, list[float]]:
    """Ask both servers for one stream at a time, by turns; return the milliseconds to each first token."""
    rng = random.Random(seed)
    ports = {"vllm": PLAIN_PORT, "gateway": GATEWAY_PORT}
    took_ms: dict[str, list[float]] = {name: [] for name in ports}
    for number, begin in enumerate(range(0, streams, ALONE_ROW)):
        row = min(ALONE_ROW, streams - begin)
        prompts = [[rng.randrange(100, 400) for _ in range(INPUT_TOKENS)] for _ in range(row)]
        for name in list(ports)[:: 1 if number % 2 == 0 else -1]:
            wait_for_rest()
            took_ms[name] += [1e3 * first_byte_s(f"127.0.0.1:{ports[name]}", alone_body(prompt)) for prompt in prompts]
    return took_ms


def alone_body(prompt: list[int]) -> dict[str, Any]:
    """Return the body of a stream that is asked for alone."""
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": ALONE_TOKENS}
    return {**wanted, "temperature": 0, "stream": True, "ignore_eos": True}


def wait_for_rest() -> None:
    """Wait until the processes of both servers leave the processors alone. Raises SystemExit if they never do."""
    until = time.monotonic() + REST_MOST_S
    before = _processor_s()
    while True:
        time.sleep(REST_LOOK_S)
        after = _processor_s()
        # One that has ended since is in the first look alone.
        took_s = sum(after[pid] - before.get(pid, 0.0) for pid in after)
        if took_s < REST_SHARE * REST_LOOK_S:
            return
        if time.monotonic() > until:
            raise SystemExit(f"the servers do not rest: they take {took_s / REST_LOOK_S:.2f} of a processor")
        before = after


def _processor_s() -> dict[int, float]:
    """Return the processor time that each process of the servers has taken, in seconds."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def report_alone(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Print and return what the gateway adds to the TTFT of streams that came alone."""
    middles = [{name: statistics.median(took_ms) for name, took_ms in took.items()} for took in rounds]
    print(f"alone: {len(rounds[0]['vllm'])} streams a round, one at a time")
    return spread_of(
        {
            "p50_ttft_added_ms": [middle["gateway"] - middle["vllm"] for middle in middles],
            "p50_ttft_ratio": [middle["gateway"] / middle["vllm"] for middle in middles],
        }
    )


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
    """Print one rate's table and return it."""
    pairs = list(zip(rounds["vllm"], rounds["gateway"], strict=True))
    for ours, plain in pairs:
        if ours["total_output_tokens"] != plain["total_output_tokens"]:
            raise SystemExit(f"{name}: the sides of a round have not generated the same number of tokens")
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
    print(f"{name}: {requests} requests a run, every one answered")
    return {"requests": requests, **spread_of(figures)}


def spread_of(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    """Print each figure and return it: the median of the rounds with the least and the most."""
    spread = {name: (statistics.median(values), min(values), max(values)) for name, values in figures.items()}
    for name, (middle, least, most) in spread.items():
        print(f"  {name:20} {middle:8.3f} [{least:.3f} .. {most:.3f}]", flush=True)
    return {name: [round(value, 3) for value in values] for name, values in spread.items()}


if __name__ == "__main__":
    main()
