"""A renderer that waits for its test, in whichever process it runs."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable

from services.worker.engine import PromptSpec, Rendered
from services.worker.simulated.engine import ByteRenderer


class Gate:
    """Two pipes, made before the fork: whoever waits says so, and goes on when the test lets it."""

    def __init__(self) -> None:
        self._reached, self._reaches = os.pipe()
        self._opened, self._opens = os.pipe()

    def wait(self) -> None:
        """In the process: wait to be let through."""
        os.write(self._reaches, b".")
        os.read(self._opened, 1)

    async def reached(self) -> None:
        """In the test: return when somebody waits, or has waited, once more than before."""
        await asyncio.wait_for(asyncio.to_thread(os.read, self._reached, 1), 60)

    def open(self) -> None:
        """In the test: let one through."""
        os.write(self._opens, b".")


class Gated(ByteRenderer):
    """Waits at its gate with some prompts, and answers one word with the number of prompts it has rendered."""

    def __init__(self, gate: Gate, waits: Callable[[PromptSpec], bool] = lambda spec: spec.text == "wait") -> None:
        super().__init__(1_000_000)
        self._gate = gate
        self._waits = waits
        self._rendered = 0

    def render(self, spec: PromptSpec) -> Rendered:
        self._rendered += 1
        if self._waits(spec):
            self._gate.wait()
        if spec.text == "how many?":
            return Rendered(array("I", [self._rendered]), None)
        return super().render(spec)
