"""Where a prompt is rendered: a short one that comes alone on the worker's own thread, all others in the processes.

To send a prompt to another process and its tokens back takes two wake-ups, each of which costs as much as to render a
short prompt, and more where every processor is busy. Where several wait, or one is long, the event loop must not be
held up, and the processes work beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.worker.engine import PromptSpec, Renderer
from services.worker.tokenizer import Answer, TokenizerPool, answer_to

SHORT_CHARACTERS = 4096
"""Of a prompt with all that is rendered into it: about a thousand tokens, half a millisecond with a fast tokenizer."""

SLOW_NS = 5_000_000
"""A short prompt that took longer is a sign of a slow tokenizer or template, or of a busy machine."""

SLOW_PAUSE_NS = 10_000_000_000
"""For so long the processes then render everything."""

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
        self._in_pool = 0
        """Prompts that the processes have not answered."""
        self._lone: asyncio.Handle | None = None
        """The one that is about to be rendered here."""
        self._not_before_ns = 0
        self._on_answer: Callable[[str, Answer], None]
        self._on_death: Callable[[str], None]

    async def start(self, on_answer: Callable[[str, Answer], None], on_death: Callable[[str], None]) -> None:
        """Begin to work on the running loop; `on_answer` gets each prompt's name and answer."""
        self._on_answer, self._on_death = on_answer, on_death
        await self._pool.start(self._answered, on_death)

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt."""
        if self._own is not None and self._is_alone() and characters(spec) <= SHORT_CHARACTERS:
            self._lone = asyncio.get_running_loop().call_soon(self._render, self._own, name, spec)
        else:
            self._in_pool += 1
            self._pool.render(name, spec)

    async def close(self) -> None:
        """End the processes."""
        if self._lone is not None:
            self._lone.cancel()
        await self._pool.close()

    def _is_alone(self) -> bool:
        return not self._in_pool and self._lone is None and self._now_ns() >= self._not_before_ns

    def _render(self, own: Renderer, name: str, spec: PromptSpec) -> None:
        self._lone = None
        try:
            began_ns = self._now_ns()
            answer = answer_to(own, name, spec)
            ended_ns = self._now_ns()
            if ended_ns - began_ns > SLOW_NS:
                self._not_before_ns = ended_ns + SLOW_PAUSE_NS
            self._on_answer(name, answer)
        except BaseException as error:  # a panic of the tokenizer's Rust is no Exception; it ends a process, too
            log.exception("a prompt could not be rendered, or its tokens not be taken")
            self._on_death("a prompt could not be rendered, or its tokens not be taken")
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise

    def _answered(self, name: str, answer: Answer) -> None:
        self._in_pool -= 1
        self._on_answer(name, answer)


def characters(spec: PromptSpec) -> int:
    """Return how much there is to render; a token id counts as one."""
    return (
        len(spec.text or "")
        + len(spec.token_ids or ())
        + len(spec.messages_json or "")
        + len(spec.chat_template)
        + len(spec.chat_template_kwargs_json)
        + len(spec.tools_json)
        + len(spec.tool_choice_json)
    )
