"""What `penstock run-batch` makes of lines for models that nobody serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.scheduler.v1 import scheduler_pb2
from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, serving
from tests.support.fake_scheduler import FakeScheduler, serving_scheduler
from tests.support.shell import Shell


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    queue = FakeQueue()
    async with serving(queue) as address:
        yield Shell(address, queue)


async def test_a_models_worker_is_waited_for_as_long_as_was_said(shell: Shell, tmp_path: Path) -> None:
    def fleet(*models: str) -> scheduler_pb2.StatusResponse:
        return scheduler_pb2.StatusResponse(workers=[scheduler_pb2.WorkerStatus(model=model) for model in models])

    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(json.dumps(completion(name, name, model=name)) + "\n" for name in "ab"))
    command = ["run-batch", "-i", str(source), "-o", str(target), "--fresh"]
    for flags, codes in (([], ["model_not_found", None]), (["--wait-s", "30"], [None, None])):
        async with serving_scheduler(FakeScheduler(*[fleet("b")] * 4, fleet("a", "b"))) as address:
            ran = await shell.run(*command, "--scheduler", address, *flags)
        assert ran.status == 0, ran.err
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        assert [(answer["error"] or {}).get("code") for answer in answers] == codes
        assert ("no worker serves 'a' yet; waiting for at most 30 s" in ran.err) == bool(flags)


async def test_a_model_that_nobody_serves_is_found_with_a_clients_key_too(shell: Shell, tmp_path: Path) -> None:
    class Locked(FakeScheduler):
        async def Status(self, request: Any, context: Any) -> Any:
            if not request.names_only:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "Status needs the role operator or service")
            return await super().Status(request, context)

    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(json.dumps(completion(name, name, model=name)) + "\n" for name in "ab"))
    served = scheduler_pb2.StatusResponse(workers=[scheduler_pb2.WorkerStatus(model="b")])
    async with serving_scheduler(Locked(served)) as address:
        ran = await shell.run("run-batch", "-i", str(source), "-o", str(target), "--scheduler", address)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(answer["error"] or {}).get("code") for answer in answers] == ["model_not_found", None], ran.err
