"""Commands that are given the address of another service than the one they ask."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.shell import Shell


async def test_swapped_addresses_are_told_as_such(tmp_path: Path) -> None:
    source, queue = tmp_path / "in", FakeQueue()
    source.write_text(json.dumps(completion("a", "p", model=None)) + "\n")
    async with serving(queue) as at, serving_scheduler(FakeScheduler()) as address:
        shell = Shell(address, queue)
        for command in (["submit", "x"], ["run-batch", "-i", str(source), "-o", str(tmp_path / "o")], ["status"]):
            ran = await shell.run(*command, "--scheduler", at)
            assert ran.status == 69
            assert f"{address} is another service, or an older one" in ran.err
            assert "swapped?" in ran.err
            assert "penstock up" not in ran.err
