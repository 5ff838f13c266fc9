"""One process with many workers: the production session, runner, links and tokenizer; an instant engine each."""

from __future__ import annotations

import argparse
import asyncio
import logging
import uuid
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.lifecycle.instant_engine import WINDOW_TOKENS, Beat, InstantEngine
from benchmarks.lifecycle.role import serve
from penstock.tls import Access
from services.clock import SystemClock
from services.rpc.loop import run_service
from services.telemetry import Telemetry
from services.worker.core.session import Session
from services.worker.engine import PromptSpec
from services.worker.gen_ai import RunSpans
from services.worker.links import queue_link, scheduler_link
from services.worker.metrics import WorkerMetrics
from services.worker.name import Name
from services.worker.rendering import Rendering
from services.worker.runner import Identity, Runner
from services.worker.service import sizes_of
from services.worker.simulated.engine import ByteRenderer
from services.worker.tokenizer import Answer, TokenizerPool


class SharedTokenizer:
    """One place to render for many workers: a run's name is unique, so it tells whose answer it is."""

    def __init__(self, rendering: Rendering) -> None:
        """Render with `rendering`."""
        self._rendering = rendering
        self._asked: dict[str, Runner] = {}

    async def start(self) -> None:
        """Begin to work on the running loop."""
        await self._rendering.start(self._answered, lambda reason: logging.error("%s", reason))

    def of(self, runner_of: list[Runner]) -> Any:
        """Return the tokenizer of the runner that `runner_of` will hold."""
        tokenizer = self

        class Own:
            def render(self, name: str, spec: PromptSpec) -> None:
                tokenizer._asked[name] = runner_of[0]
                tokenizer._rendering.render(name, spec)

            def forget(self, name: str) -> None:
                tokenizer._rendering.forget(name)

        return Own()

    def _answered(self, name: str, answer: Answer) -> None:
        self._asked.pop(name).tokenized(name, answer)


class Fleet:
    """The workers of this process."""

    def __init__(self, options: argparse.Namespace, rendering: Rendering) -> None:
        """Make them; nothing runs yet."""
        self._options = options
        paced = options.rate_per_s or options.service_s
        self._beat = Beat(options.rate_per_s, options.service_s) if paced else None
        self._tokenizer = SharedTokenizer(rendering)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> dict[str, Any]:
        """Connect every worker."""
        await self._tokenizer.start()
        if self._beat is not None:
            self._spawn(self._beat.run())
        for number in range(self._options.workers):
            self._start_one(number)
        return {"workers": self._options.workers}

    def _start_one(self, number: int) -> None:
        options = self._options
        engine = InstantEngine(options.requests_at_once, options.blocks_each, self._beat)
        shape = engine.shape
        session = Session(sizes_of(shape, shape.blocks_total))
        held: list[Runner] = []
        runner = Runner(
            Identity(f"worker-{number}", uuid.uuid4().hex, shape.blocks_total),
            session,
            engine,
            self._tokenizer.of(held),
            SystemClock(),
            WorkerMetrics(session, shape.blocks_total, CollectorRegistry()),
            RunSpans(Telemetry(None), shape, f"worker-{number}"),
        )
        held.append(runner)
        name = Name()
        scheduler = scheduler_link(options.scheduler, Access(), runner.post, runner.grant_arrived, name)
        queue = queue_link(options.queue, Access(), runner.post, runner.deliver_arrived, name)
        runner.connect(scheduler, queue)
        for work in (runner.run(), scheduler.run(), queue.run()):
            self._spawn(work)

    def _spawn(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--scheduler", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--requests-at-once", type=int, default=1024)
    parser.add_argument("--blocks-each", type=int, default=64)
    parser.add_argument("--rate-per-s", type=float, default=0.0)
    parser.add_argument("--service-s", type=float, default=0.0)
    options = parser.parse_args()
    pool = TokenizerPool.fork(lambda: ByteRenderer(WINDOW_TOKENS))

    async def work() -> None:
        await serve({"start": Fleet(options, Rendering(pool, ByteRenderer(WINDOW_TOKENS))).start})

    run_service(work())


if __name__ == "__main__":
    main()
