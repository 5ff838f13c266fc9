"""Lines may have fields of their own, as for `vllm run-batch`: none is read, and none passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, serving
from tests.support.shell import Ran, Shell
from tests.unit.cli.test_run_batch import NO_SCHEDULER


async def ran_with(directory: Path, *more: dict[str, Any]) -> Ran:
    """Return how a run of lines ended that have these fields more."""
    lines = [{**completion(f"c-{at}", "p", model=None), **fields} for at, fields in enumerate(more)]
    (directory / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    queue = FakeQueue()
    async with serving(queue) as address:
        shell = Shell(address, queue)
        ran = await shell.run("run-batch", "-i", str(directory / "in"), "-o", str(directory / "out"), *NO_SCHEDULER)
    answers = [json.loads(line) for line in (directory / "out").read_text().splitlines()]
    assert [answer["error"] for answer in answers] == [None] * len(more)
    return ran


async def test_fields_that_are_not_read_are_named_once_with_their_first_line(tmp_path: Path) -> None:
    ran = await ran_with(tmp_path, {}, {"metadata": None}, {"metadata": {"a": 1}, "\x1b[2J": 1}, {"metadata": 2})
    fields = "the fields of a line are custom_id, method, url, body"
    assert [line for line in ran.err.splitlines() if "not read" in line] == [
        f"'metadata' is not read, first in line 2: {fields}",
        f"'\\x1b[2J' is not read, first in line 3: {fields}",
    ]


async def test_of_many_fields_the_first_are_named(tmp_path: Path) -> None:
    ran = await ran_with(tmp_path, *({f"field {at}": at} for at in range(20)))
    said = [line for line in ran.err.splitlines() if "not read" in line]
    assert (len(said), said[-1]) == (11, "line 11 has one more field that is not read; no others are named")
