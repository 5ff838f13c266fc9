"""Of lines that have their answers no more is read again than what the others need."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock.batch.finished import Finished, UnknownLinesError, have_what_it_had
from penstock.batch.journal import Header, Journal
from penstock.batch.reader import Ask, InputFile, LineError, asks
from penstock.openai.bodies import parse_body
from tests.support.batch_lines import chat, completion
from tests.unit.batch.test_runner import Bench

ODD = [
    completion("a", "x"),
    {**completion("a", "again"), "metadata": 1},
    completion("b", "x", n=0),
    "{broken",
    {**completion("b", "x"), "method": "GET"},
    {"custom_id": 5},
    chat("\ud800", "x"),
    chat("c", "\ud800"),
    chat("c", "x"),
]
"""Repeated ids and wrong lines, which have an id of their own, another's, or none."""


def written(path: Path, lines: Sequence[Any]) -> InputFile:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return InputFile(path)


def told(item: Ask | LineError) -> tuple[Any, ...]:
    return (item.line, item.code, str(item)) if isinstance(item, LineError) else (item.line, item.body, item.not_read)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the lines whose bodies are looked at."""
    ids: list[str] = []

    def noting(url: str, body: dict[str, Any]) -> Any:
        ids.append(body.get("prompt", ""))
        return parse_body(url, body)

    monkeypatch.setattr("penstock.batch.reader.parse_body", noting)
    return ids


def test_what_others_have_of_lines_that_are_over_is_the_same(tmp_path: Path) -> None:
    source = written(tmp_path / "in", ODD)
    whole = {item.line: told(item) for item in asks(source) if isinstance(item, Ask | LineError)}
    assert len(whole) == len(ODD)
    for choice in product([False, True], repeat=len(ODD)):
        over = {line for line, is_over in enumerate(choice, 1) if is_over}
        found = list(asks(source, over.__contains__))
        assert [item.line for item in found] == list(whole)
        left = [told(item) for item in found if isinstance(item, Ask | LineError)]
        assert left == [whole[line] for line in whole if line not in over]


def test_fields_beside_those_of_a_line_are_told_of_one_that_is_over(tmp_path: Path) -> None:
    found = list(asks(written(tmp_path / "in", ODD), lambda _line: True))
    assert [(item.line, item.not_read) for item in found if not isinstance(item, LineError) and item.not_read] == [
        (2, ("metadata",))
    ]


async def test_a_run_that_goes_on_looks_at_no_body_that_is_answered(tmp_path: Path, parsed: list[str]) -> None:
    bench = Bench(tmp_path, [completion(f"c-{at}", f"p {at}") for at in range(50)])
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 50)
    for request in bench.queue.requests[:49]:
        await bench.queue.finish(request)
    await until(lambda: bench.observer.answered == 49)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    parsed.clear()
    run = asyncio.create_task(bench.run())
    await until(lambda: bool(parsed))
    await bench.queue.finish_all()
    await run
    assert ({*parsed}, bench.observer.passed_lines) == ({"p 49"}, 49)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.001)


class Had:
    """What is asked of `have_what_it_had` for lines `answered`, of a run whose output has `lines`."""

    def __init__(self, directory: Path, source: InputFile, answered: Sequence[int], lines: Sequence[Any] = ()) -> None:
        self.source = source
        self.journal = Journal(directory / "journal", source)
        self.journal.start(Header("key", "key", "store", source.sha256), of_answered=True)
        for line in answered:
            self.journal.add(line, line, {"id": "x", "custom_id": f"c-{line}", "response": None, "error": None})
        written(directory / "out", lines).close()
        self.output = Finished(directory / "out")
        self.passed: list[int] = []
        self.asked: list[list[int]] = []

    async def complete(self, under_way: int, absent: int = 0) -> None:
        async def count(lines: Sequence[int]) -> int:
            self.asked.append(list(lines))
            return absent

        try:
            await have_what_it_had(self.journal, self.source, self.output, count, self.passed.append, under_way)
        finally:
            self.journal.close()


async def test_a_retry_looks_at_the_lines_alone_that_have_no_answer(tmp_path: Path, parsed: list[str]) -> None:
    """One wrong line is enough to have it look: no queue has a result of it."""
    lines = [completion(f"c-{line}", f"p {line}") for line in range(1, 50)]
    source = written(tmp_path / "in", [*lines, completion("c-50", "p 50", n=0)])
    had = Had(tmp_path, source, range(1, 50))
    await had.complete(under_way=0)
    assert parsed == ["p 50"]
    assert (had.passed, had.asked) == ([*range(1, 51)], [[]])


async def test_lines_of_which_nothing_is_known_may_be_those_under_way(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [completion(f"c-{line}", "p") for line in range(1, 6)])
    answers = [{"id": "x", "custom_id": f"c-{line}", "response": None, "error": None} for line in range(1, 4)]
    for under_way, absent, unknown, asked in ((1, 0, 2, []), (2, 0, 0, [[4, 5]]), (3, 1, 1, [[4, 5]])):
        (tmp_path / "journal").unlink(missing_ok=True)
        had = Had(tmp_path, source, [1], answers)
        with pytest.raises(UnknownLinesError) if unknown else nullcontext() as refused:
            await had.complete(under_way, absent)
        assert (refused.value.lines if refused else 0) == unknown
        assert had.asked == asked
        assert had.journal.answered == 3
