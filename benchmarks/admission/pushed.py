"""Plain vLLM with clients of its own: everything at once, a window, fixed or not, or back-off when vLLM refuses.

Usage: python -m benchmarks.admission.pushed [engine flags]; then one JSON object a line on standard input, as
`Order`. One JSON line each on standard output when it is done, after a first one that says the engine is up.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.admission.windows import ADAPTIVE, LIVE, WHOLE_WINDOWS, AdaptiveWindow, LiveWindow
from benchmarks.plain_vllm import make_engine

FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0
"""A refused client comes again after pauses that double between these, each with chance in it."""


class Order(NamedTuple):
    """What to run: a batch file, when its lines arrive, who is let in, and how many windows the empty cache holds."""

    path: str
    arrivals_s: list[float]
    lets_in: str
    windows: int


class Window:
    """A client's line before the engine, first come, first served, and how many may be past it; one always may."""

    def __init__(self, size: int) -> None:
        """Let `size` requests in."""
        self.size = size
        self._inside = 0
        self._line: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a place."""
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self.let_in()
        await place

    def leave(self) -> None:
        """Give the place back."""
        self._inside -= 1
        self.adapt(self._inside)
        self.let_in()

    def let_in(self) -> None:
        """Let in whom there is a place for."""
        while self._line and self._inside < max(self.size, 1):
            self._inside += 1
            self._line.popleft().set_result(None)

    def adapt(self, inside: int) -> None:
        """Change the size after an answer, with so many left inside; a fixed one does not."""


class Adapting(Window):
    """A window that adapts to the engine's preemptions."""

    def __init__(self, preemptions: Callable[[], int]) -> None:
        """Begin small; `preemptions` tells how many there were."""
        self._adaptive = AdaptiveWindow()
        self._preemptions, self._seen = preemptions, preemptions()
        super().__init__(int(self._adaptive.size))

    def adapt(self, inside: int) -> None:
        """Halve for a preemption, else grow."""
        preempted, self._seen = self._preemptions() > self._seen, self._preemptions()
        self._adaptive.adapt(1, inside, preempted)
        self.size = int(self._adaptive.size)


class Following(Window):
    """A window that follows what the engine says is free."""

    def __init__(self, kv_tokens: int, window_tokens: int) -> None:
        """Begin with the whole windows of an empty cache of so many tokens."""
        self._kv_tokens = kv_tokens
        self._live = LiveWindow(kv_tokens, window_tokens)
        super().__init__(self._live.size)

    def leave(self) -> None:
        """Wait for the engine to say so: it tells of an end together with what is free since."""

    def heard(self, usage: float, running: int, ended: int) -> None:
        """Take in what share of the cache a step left held, how many requests run after it, and how many it ended."""
        self._inside -= ended
        self._live.heard(running, round((1 - usage) * self._kv_tokens))
        self.size = self._live.size
        self.let_in()


class Client:
    """Runs orders on an engine."""

    def __init__(self, engine: Any, usage: Any) -> None:
        """Push into `engine`; `usage` counts its preemptions."""
        self._engine, self._usage = engine, usage
        self._refusals = 0
        self._orders = 0

    async def run(self, order: Order) -> dict[str, Any]:
        """Run one order; return its moments on the monotonic clock, and how often vLLM refused."""
        lines = [json.loads(line) for line in Path(order.path).read_text().splitlines()]
        await self._engine.reset_prefix_cache()
        self._usage.latest.reset()
        self._refusals = 0
        self._orders += 1
        window = self.window(order)
        started_ns = time.monotonic_ns()
        pairs = zip(lines, order.arrivals_s, strict=True)
        tokens = await asyncio.gather(*(self._one(line, at_s, i, window) for i, (line, at_s) in enumerate(pairs)))
        return {
            "started_ns": started_ns,
            "ended_ns": time.monotonic_ns(),
            "tokens": tokens,
            "refusals": self._refusals,
        }

    def window(self, order: Order) -> Window:
        """Return the window of an order, which hears of the engine if it follows it."""
        latest = self._usage.latest
        latest.listen = None
        if order.lets_in == ADAPTIVE:
            return Adapting(lambda: int(latest.preemptions))
        if order.lets_in == LIVE:
            config = self._engine.vllm_config
            # The null block is one of vLLM's.
            kv_tokens = (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size
            window = Following(kv_tokens, config.model_config.max_model_len)
            latest.listen = window.heard
            return window
        return Window(order.windows if order.lets_in == WHOLE_WINDOWS else sys.maxsize)

    async def _one(self, line: dict[str, Any], at_s: float, index: int, window: Window) -> tuple[int, int]:
        """Run one line when its time has come; return its prompt and output tokens."""
        if at_s:
            await asyncio.sleep(at_s)
        await window.enter()
        try:
            return await self._generate(line, f"{self._orders}-{index}")
        finally:
            window.leave()

    async def _generate(self, line: dict[str, Any], name: str) -> tuple[int, int]:
        from vllm import SamplingParams
        from vllm.exceptions import QueueOverflowError
        from vllm.sampling_params import RequestOutputKind

        body, pause_s = line["body"], FIRST_PAUSE_S
        while True:
            params = SamplingParams(
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                extra_args=body["vllm_xargs"],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            try:
                async for output in self._engine.generate({"prompt": body["prompt"]}, params, name):
                    last = output
                return len(last.prompt_token_ids), len(last.outputs[0].token_ids)
            except QueueOverflowError:
                self._refusals += 1
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)


async def serve() -> None:
    """Answer orders from standard input until it ends."""
    engine, usage = make_engine()
    client = Client(engine, usage)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await client.run(Order(**json.loads(line)))), flush=True)
    engine.shutdown()
    del client, engine  # its finalizer needs modules that the interpreter's own end has taken down already


if __name__ == "__main__":
    asyncio.run(serve())
