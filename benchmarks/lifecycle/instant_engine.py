"""An engine that answers at once: one token, no time, no arithmetic. What is left to measure is everything around it.

With `rate_per_s` or `service_s` it holds its answers back: to a total rate, or each for a fixed time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from services.worker.core.messages import EngineReported
from services.worker.engine import ChoiceStep, EngineRequest, EngineShape, EngineStep, StepTokens

BLOCK_TOKENS = 16
WINDOW_TOKENS = 2048
BEAT_S = 0.005
"""How often held-back answers are let go."""

ANSWER = EngineStep((ChoiceStep(0, (98,), "ba", finish_reason="length"),), finished=True)


class InstantEngine:
    """Implements `services.worker.engine.Engine`."""

    def __init__(self, requests_at_once: int, blocks_each: int, beat: Beat | None) -> None:
        """Hold `requests_at_once` requests of `blocks_each` blocks; answer at the pace of `beat`, at once if None."""
        self._blocks = requests_at_once * blocks_each
        self._requests_at_once = requests_at_once
        self._beat = beat

    @property
    def shape(self) -> EngineShape:
        """What the engine can hold."""
        return EngineShape(
            engine="instant",
            blocks_total=self._blocks,
            block_size=BLOCK_TOKENS,
            max_model_len=WINDOW_TOKENS,
            max_num_seqs=self._requests_at_once,
            lookahead_tokens=0,
            model="instant",
            byte_bounded_tokenizer=True,
        )

    def start(
        self,
        on_stats: Callable[[EngineReported], None],
        on_death: Callable[[str], None],
        on_tokens: Callable[[StepTokens], None],
    ) -> None:
        """Begin; there is nothing to report."""
        del on_stats, on_death, on_tokens

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        """Answer a request."""
        if self._beat is not None:
            await self._beat.wait()
        del request
        yield ANSWER

    def tell_at(self, run_id: str, tokens: int) -> None:
        """Hold nothing back."""

    async def abort(self, run_id: str) -> None:
        """Abort nothing: every run is over already."""

    async def close(self, _: float = 0) -> None:
        """Stop."""


class Beat:
    """Lets waiting answers go: at most `rate_per_s` of them, each after `service_s`; 0 means no bound."""

    def __init__(self, rate_per_s: float, service_s: float) -> None:
        """Hold nothing yet."""
        self._rate_per_s = rate_per_s
        self._service_s = service_s
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()

    async def wait(self) -> None:
        """Return when this answer may go."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.append((loop.time() + self._service_s, answer))
        await answer

    async def run(self) -> None:
        """Let answers go until cancelled."""
        loop = asyncio.get_running_loop()
        allowance, last_s = 0.0, loop.time()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = loop.time()
            # What was not used is kept for one beat only: a pause is not made up for by a burst.
            most = max(2 * BEAT_S * self._rate_per_s, 1.0)
            allowance = (
                min(allowance + (now_s - last_s) * self._rate_per_s, most) if self._rate_per_s else len(self._waiting)
            )
            last_s = now_s
            while self._waiting and allowance >= 1 and self._waiting[0][0] <= now_s:
                _, answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(None)
                allowance -= 1
