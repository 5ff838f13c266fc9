"""Where a prompt is rendered: a short one that comes alone on the worker's own thread, all others in the processes.

To send a prompt to another process and its tokens back takes two wake-ups, each of which costs as much as to render a
short prompt, and more where every processor is busy. Where several wait, or one is long, the event loop must not be
held up, and the processes work beside it; long ones there do not keep a short one from being alone here. What has a
form to be looked at as well might end who looks at it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.worker.engine import PromptSpec, Renderer
from services.worker.tokenizer import Answer, OnAnswer, OnDeath, Refusal, TokenizerPool, answer_to, failed

SHORT_CHARACTERS = 4096
"""Of a prompt with all that is rendered into it: about a thousand tokens, half a millisecond with a fast tokenizer."""

SLOW_NS = 5_000_000
"""A short prompt that took longer is a sign of a slow tokenizer or template, or of a busy machine."""

SLOW_PAUSE_NS = 10_000_000_000
"""For so long the processes then render everything."""

DEADLY_PAUSE_NS = 600_000_000_000
"""And for so long after a process died of a prompt: its next attempts, which follow soon, are in a process too."""

log = logging.getLogger("worker.rendering")


class Rendering:
    """A renderer on the event loop's thread before a pool of tokenizer processes."""

    def __init__(
        self, pool: TokenizerPool, own: Renderer | None, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Render with `pool`, and where that is quicker with `own`, which nothing else calls from another thread."""
        self._pool = pool
        self._own = own
        self._now_ns = now_ns
        self._lone: asyncio.Handle | None = None
        """The one that is about to be rendered here."""
        self._company: set[str] = set()
        """Those that might have been rendered here, and that the processes have not answered."""
        self._not_before_ns = 0
        self._on_answer: OnAnswer
        self._on_death: OnDeath

    async def start(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
        """Begin to work on the running loop; `on_answer` gets each prompt's name and answer."""
        self._on_answer, self._on_death = on_answer, on_death
        await self._pool.start(self._answered, on_death)

    async def loaded(self) -> None:
        """Return when every process can render; never if one cannot, of which `on_death` is told."""
        await self._pool.loaded()

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt."""
        fits_here = not spec.form and spec.characters <= SHORT_CHARACTERS
        if self._own is not None and fits_here and self._is_alone():
            self._lone = asyncio.get_running_loop().call_soon(self._render, self._own, name, spec)
            return
        if fits_here:
            self._company.add(name)
        self._pool.render(name, spec)

    def forget(self, name: str) -> None:
        """Leave a prompt out that nobody waits for any more; one that is about to be rendered here is not worth it."""
        self._company.discard(name)
        self._pool.forget(name)

    async def close(self) -> None:
        """End the processes."""
        if self._lone is not None:
            self._lone.cancel()
        await self._pool.close()

    def _answered(self, name: str, answer: Answer) -> None:
        """Pass on what a process answered; what it died of may be tried again, and not on this thread."""
        self._company.discard(name)
        if isinstance(answer, Refusal) and not answer.rejects:
            self._not_before_ns = self._now_ns() + DEADLY_PAUSE_NS
        self._on_answer(name, answer)

    def _is_alone(self) -> bool:
        return not self._company and self._lone is None and self._now_ns() >= self._not_before_ns

    def _render(self, own: Renderer, name: str, spec: PromptSpec) -> None:
        self._lone = None
        began_ns = self._now_ns()
        try:
            answer = answer_to(own, name, spec)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:  # of the tokenizer's Rust, which is no Exception; a process would end of it
            log.exception("%s: rendering it failed", name)
            answer = failed(f"the tokenizer failed at the prompt: {type(panic).__name__}: {panic}")
            # What is tried again meanwhile is not tried with what may be broken.
            self._not_before_ns = self._now_ns() + SLOW_PAUSE_NS
        else:
            ended_ns = self._now_ns()
            if ended_ns - began_ns > SLOW_NS:
                self._not_before_ns = ended_ns + SLOW_PAUSE_NS
        try:
            self._on_answer(name, answer)
        except Exception:
            log.exception("%s: its tokens cannot be taken", name)
            self._on_death("the tokenizer's answers cannot be taken")
