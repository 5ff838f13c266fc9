"""The two kinds of sides on real vLLM: a process that pushes, and a Penstock stack that grants. One engine each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.admission.trace import FILE
from benchmarks.admission.windows import ADAPTIVE, EVERYBODY, LIVE, WHOLE_WINDOWS
from benchmarks.workload import write
from penstock.client import Client
from penstock.fields import RequestFields
from penstock.results import Outcome
from services.scheduler.core.admission.policies import POLICIES

START_S = 300.0
"""Longest an engine may take to start: several start at once on few cores."""

STOP_S = 60.0
"""Longest a side may take to stop before it is killed."""


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""One thread for each engine's arithmetic, and its cache as large as its flags say, whatever memory is free."""


class PushedPolicy(NamedTuple):
    """What the engine of a client without Penstock is told, and whom that client lets in."""

    engine_flags: tuple[str, ...]
    lets_in: str = EVERYBODY


PUSHED = {
    "push": PushedPolicy(()),
    "watermark-0.2": PushedPolicy(("--watermark", "0.2")),
    "watermark-0.15": PushedPolicy(("--watermark", "0.15")),
    "watermark": PushedPolicy(("--watermark", "0.1")),
    "watermark-0.05": PushedPolicy(("--watermark", "0.05")),
    "watermark-0.02": PushedPolicy(("--watermark", "0.02")),  # what Penstock's own engines have
    # The cap on requests inside is what vLLM's documentation of the option advises: max_num_seqs. One that is refused
    # is tokenized again each time it comes: a few milliseconds of the front-end's that none of the others pay.
    "watermark-capped": PushedPolicy(("--watermark", "0.1", "--max-num-queued-reqs", "256")),
    "old-pull": PushedPolicy((), WHOLE_WINDOWS),
    "live-pull": PushedPolicy((), LIVE),
    "aimd": PushedPolicy((), ADAPTIVE),
}
"""Policies that put requests straight into vLLM."""

PENSTOCK = tuple(POLICIES)
"""Policies of Penstock's scheduler."""


class Done(NamedTuple):
    """When a run began and ended on the monotonic clock, the output tokens the client got, and vLLM's refusals."""

    started_ns: int
    ended_ns: int
    output_tokens: int
    refusals: int = 0


class Side(ABC):
    """A running engine and whoever gives it requests."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        """Run `command`; what it prints, and the recorder's file, go to `directory`."""
        self.trace = directory / "trace.jsonl"
        self._directory = directory
        self._command = command
        self._environment = {**os.environ, **ENVIRONMENT, FILE: str(self.trace), **environment}
        # Without its compiled files vLLM takes half a minute to import.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        """Start the process."""
        with (self._directory / "stderr").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=log, env=self._environment, limit=1 << 26
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the process."""
        process = self.process
        await self.stop()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def process(self) -> Process:
        """The running process."""
        if self._process is None:
            raise RuntimeError("the side has not been started")
        return self._process

    async def lines(self) -> AsyncIterator[str]:
        """Yield what the process prints. Raises RuntimeError with the end of its log when it ends."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            yield line.decode()
        log = (self._directory / "stderr").read_text(errors="replace")
        raise RuntimeError(f"{' '.join(self._command[:4])} ended early:\n{log[-2000:]}")

    @abstractmethod
    async def ready(self) -> None:
        """Wait until requests can be given."""

    @abstractmethod
    async def stop(self) -> None:
        """Ask the process to end."""

    @abstractmethod
    async def run(self, policy: str, lines: list[dict[str, Any]], arrivals_s: Sequence[float]) -> Done:
        """Run batch lines, each at its moment, to the last answer."""


class Pushed(Side):
    """Plain vLLM with the clients of pushed.py."""

    def __init__(self, flags: list[str], directory: Path, windows: int) -> None:
        """Start vLLM with `flags`; `windows` whole windows fit its cache."""
        super().__init__([sys.executable, "-m", "benchmarks.admission.pushed", *flags], directory, {})
        self._windows = windows

    async def _answer(self) -> dict[str, Any]:
        """Return the next JSON object, passing over anything else a library prints."""
        async for line in self.lines():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the output does not end")

    async def ready(self) -> None:
        """Wait for the engine."""
        async with asyncio.timeout(START_S):
            await self._answer()

    async def stop(self) -> None:
        """End its input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def run(self, policy: str, lines: list[dict[str, Any]], arrivals_s: Sequence[float]) -> Done:
        """Hand over a file and wait for the answer."""
        assert self.process.stdin is not None
        path = write(lines, self._directory / "requests.jsonl")
        order = {
            "path": str(path),
            "arrivals_s": list(arrivals_s),
            "lets_in": PUSHED[policy].lets_in,
            "windows": self._windows,
        }
        self.process.stdin.write(f"{json.dumps(order)}\n".encode())
        await self.process.stdin.drain()
        answer = await self._answer()
        output_tokens = sum(output for _, output in answer["tokens"])
        return Done(answer["started_ns"], answer["ended_ns"], output_tokens, answer["refusals"])


class Penstock(Side):
    """A whole stack under one policy, and a client of its queue."""

    def __init__(self, policy: str, flags: list[str], directory: Path) -> None:
        """Start the stack with free ports."""
        command = [sys.executable, "-m", "penstock", "up", "--data-dir", str(directory / "data"), "--base-port", "0"]
        super().__init__([*command, *flags], directory, {"PENSTOCK_SCHEDULER_POLICY": policy})
        self._client: Client | None = None
        self._runs = 0

    async def ready(self) -> None:
        """Wait for the stack."""
        queue = ""
        async with asyncio.timeout(START_S):
            async for line in self.lines():
                if line.startswith("queue "):
                    queue = line.split()[1]
                if line.startswith("ready"):
                    break
        self._client = Client(queue)

    async def stop(self) -> None:
        """Interrupt it, as a person would."""
        if self._client is not None:
            await self._client.close()
        self.process.send_signal(signal.SIGINT)

    async def run(self, policy: str, lines: list[dict[str, Any]], arrivals_s: Sequence[float]) -> Done:
        """Submit every line and watch for the results."""
        assert self._client is not None
        self._runs += 1
        batch = f"run-{self._runs}"
        started_ns = time.monotonic_ns()
        submitting = asyncio.create_task(self._submit(self._client, batch, lines, arrivals_s))
        tokens = seen = 0
        async with aclosing(self._client.watch(batch, follow=True)) as results:
            async for result in results:
                if result.outcome is not Outcome.COMPLETED:
                    raise RuntimeError(f"{policy}: {result}")
                tokens += result.usage.completion_tokens
                seen += 1
                if seen == len(lines):
                    break
        ended_ns = time.monotonic_ns()
        await submitting
        return Done(started_ns, ended_ns, tokens)

    @staticmethod
    async def _submit(client: Client, batch: str, lines: list[dict[str, Any]], arrivals_s: Sequence[float]) -> None:
        began_s = time.monotonic()

        async def requests() -> AsyncIterator[RequestFields]:
            for line, at_s in zip(lines, arrivals_s, strict=True):
                wait_s = began_s + at_s - time.monotonic()
                if at_s and wait_s > 0:
                    await asyncio.sleep(wait_s)
                body = line["body"]
                yield {
                    "prompt": body["prompt"],
                    "max_tokens": body["max_tokens"],
                    "temperature": 0.0,
                    "extra_args": body["vllm_xargs"],
                    "batch": batch,
                }

        async with aclosing(client.submit_many(requests())) as acks:
            async for ack in acks:
                if ack.error:
                    raise RuntimeError(f"refused: {ack}")
