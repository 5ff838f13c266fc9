"""What is at the place of an output is looked at in pieces: it may be large, and any file."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.batch import finished
from penstock.batch.finished import BREATHE_EVERY, Finished
from penstock.errors import NotFound

MANY = 3000


class Forgetful:
    """A client of a queue that has no result any more."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def wire_get(self, request: Any) -> Any:
        self.asked.append(request.request_id)
        raise NotFound("it was deleted")


async def batch_of(path: Path) -> tuple[str, list[str]]:
    client: Any = Forgetful()
    return await Finished(path).batch(client), client.asked


def line(number: int, error: str = "null") -> str:
    return f'{{"id": "vllm-r-{number}", "custom_id": "c", "response": null, "error": {error}}}\n'


async def test_a_file_without_an_end_of_a_line_is_not_taken_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished, "MOST_OF_A_LINE_BYTES", 64 * 1024)
    for begins in ("", line(1)):
        (tmp_path / "out").write_text(begins)
        with (tmp_path / "out").open("ab") as file:
            file.truncate(32 * 1024 * 1024)
        tracemalloc.start()
        try:
            assert await batch_of(tmp_path / "out") == ("", ["r-1"] if begins else [])
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()


async def test_a_file_that_is_no_output_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    name_in = finished._name_in

    def noting(line: bytes) -> str:
        looked.append(line)
        return name_in(line)

    monkeypatch.setattr(finished, "_name_in", noting)
    (tmp_path / "out").write_text("something else\n" * MANY)
    assert await batch_of(tmp_path / "out") == ("", [])
    assert len(looked) == finished.LOOKS


async def test_others_have_turns_while_the_errors_of_an_output_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("".join(line(at, "{}" if at % 100 == 1 else "null") for at in range(MANY)))
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(turn())
    found, asked = await batch_of(tmp_path / "out")
    other.cancel()
    errors = [f"r-{at}" for at in range(1, MANY, 100)][: finished.LOOKS]
    assert (found, asked[-len(errors) :]) == ("", errors)
    assert turns > 1500 // BREATHE_EVERY - 5
