"""What a tokenizer has answered."""

from __future__ import annotations

import asyncio

from services.worker.tokenizer import Answer


class Answered:
    """Answers by name, and the deaths that were reported; `takes_answers` off, an answer is an error."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.deaths: list[str] = []
        self.takes_answers = True
        self._changed = asyncio.Event()

    def answer(self, name: str, answer: Answer) -> None:
        if not self.takes_answers:
            raise TypeError("tuple object expected")
        self.answers[name] = answer
        self._changed.set()

    def died(self, reason: str) -> None:
        self.deaths.append(reason)
        self._changed.set()

    async def until(self, count: int = 0, deaths: int = 0) -> None:
        """Wait for so many answers and deaths."""
        while len(self.answers) < count or len(self.deaths) < deaths:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 20)
