"""Work on large JSON leaves the loop to others piece by piece."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from starlette.types import Message

from penstock.batch.reader import custom_id_of
from services.gateway import intake
from services.gateway.batch import lines as batch_lines
from services.gateway.batch import output, reading
from services.gateway.batch.lines import ask_of
from services.gateway.batch.reading import count_lines
from services.gateway.batch.turns import Reader, Turns
from services.gateway.core.batch import Batch
from services.gateway.intake import Intake
from services.gateway.pace import LARGE_BYTES, give_way
from tests.support.batch_lines import completion

T = TypeVar("T")
PIECES = 5
URL = "/v1/completions"


class Loop:
    """Who has the loop, in order."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def working(self, work: Callable[..., T]) -> Callable[..., T]:
        """Return `work`, noted."""

        def noted(*args: Any) -> T:
            self.turns.append("work")
            return work(*args)

        return noted

    async def beside_others(self, work: Coroutine[Any, Any, T]) -> T:
        """Work while others want the loop all the time."""
        others = asyncio.create_task(self._others())
        try:
            return await work
        finally:
            others.cancel()

    async def _others(self) -> None:
        while True:
            self.turns.append("others")
            await asyncio.sleep(0)

    def check(self) -> None:
        """All pieces were worked on, and others came between any two."""
        assert self.turns.count("work") == PIECES
        assert ("work", "work") not in pairwise(self.turns)


async def test_bodies_that_arrive_together_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(intake, "parse_object", loop.working(intake.parse_object))
    reader, body = Intake(5), json.dumps({"prompt": "x" * LARGE_BYTES}).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def read_all() -> list[dict[str, Any]]:
        return await asyncio.gather(
            *(reader.read({"content-type": "application/json"}, receive) for _ in range(PIECES))
        )

    assert await loop.beside_others(read_all()) == [json.loads(body)] * PIECES
    loop.check()


class OneFile:
    """The part of a shelf that reads."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def content(self, _file_id: str, _offset: int) -> AsyncGenerator[bytes, None]:
        yield self._content


async def test_large_lines_of_one_part_are_understood_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(reading, "ask_of", loop.working(ask_of))
    lines = [json.dumps(completion(f"c{n}", "x" * LARGE_BYTES)) for n in range(PIECES)]
    shelf: Any = OneFile("\n".join(lines).encode())
    batch = Batch("batch_1", URL, "file-1", "24h", 0, 3600, "batch")
    async with Turns().to_read(Reader("", 0, lambda: None)) as turn:
        assert await loop.beside_others(count_lines(shelf, batch, (), turn)) == PIECES
    loop.check()


async def test_large_lines_are_named_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, output_pauses = Loop(), []

    async def noted(size_bytes: int, since_s: float) -> None:
        output_pauses.append(size_bytes)
        await give_way(size_bytes, since_s)

    monkeypatch.setattr(batch_lines, "custom_id_of", loop.working(custom_id_of))
    monkeypatch.setattr(batch_lines, "give_way", noted)
    lines = [json.dumps(completion(f"c{n}", "x" * LARGE_BYTES)) for n in range(PIECES)]
    files: Any = OneFile("\n".join(lines).encode())
    client: Any = None
    batch = Batch("batch_1", URL, "file-1", "24h", 0, 3600, "batch")
    turn = Turns().to_read(Reader("", 0, lambda: None))

    async def told() -> list[str]:
        rest = output.Output(client, files).unsubmitted(batch, False, turn)
        return [json.loads(line)["custom_id"] async for line in rest]

    assert await loop.beside_others(told()) == [f"c{n}" for n in range(PIECES)]
    assert output_pauses == [len(line) for line in lines]
    loop.check()


async def test_others_have_the_loop_for_as_long_as_the_work_took(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses_s.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    since_s = time.monotonic() - 3
    await give_way(LARGE_BYTES - 1, since_s)
    assert not pauses_s
    await give_way(LARGE_BYTES, since_s)
    assert pauses_s[0] >= 3
