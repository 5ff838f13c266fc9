"""What `penstock run-batch` makes of lines for models that nobody serves."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.cli import batch_fleet, vain
from penstock.cli.batch_fleet import Peers, Served, look_again, served_models, telling_what_waits
from penstock.connection import Patience
from penstock.fleet import BACK_WITHIN_S
from penstock.request.v1 import request_pb2
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


def young(*models: str, up_s: float = 1.0) -> scheduler_pb2.StatusResponse:
    workers = [scheduler_pb2.WorkerStatus(model=model) for model in models]
    return scheduler_pb2.StatusResponse(workers=workers, up_ns=int(up_s * 1e9))


def hush(_: str) -> None:
    """Say nothing."""


@pytest.mark.parametrize("looks", [2, 4])
async def test_a_worker_that_may_not_be_back_yet_is_waited_for(looks: int) -> None:
    said: list[str] = []
    async with serving_scheduler(FakeScheduler(*[young("a")] * looks, young("a", "b"))) as address:
        peers = Peers("127.0.0.1:1", address, 0.0)
        first = await served_models(peers, False, said.append)
        assert first == Served({"a"}, is_final=False)
        assert await look_again(peers, first, said.append, {"b"}) == {"a", "b"}
    assert said == ["no worker serves 'b' yet; waiting for at most 11 s"], "once"


async def test_a_scheduler_that_is_old_enough_in_the_end_has_told_all() -> None:
    old = young("a", up_s=BACK_WITHIN_S)
    async with serving_scheduler(FakeScheduler(young("a"), young("a", up_s=BACK_WITHIN_S - 0.1), old)) as address:
        peers = Peers("127.0.0.1:1", address, 0.0)
        first = await served_models(peers, False, hush)
        assert await look_again(peers, first, hush, {"b"}) == {"a"}


@pytest.mark.parametrize(
    ("statuses", "started_here", "known"),
    [
        ([young("a")], False, None),
        ([young("a"), young()], False, None),
        ([young("a", up_s=60), young("a")], False, {"a"}),
        ([young("a", up_s=60), young()], False, {"a"}),
        ([young("a")], True, {"a"}),
    ],
    ids=["still young", "nobody there", "young since", "nobody there since", "of this command"],
)
async def test_where_it_is_not_known_in_the_end_what_is_served_a_whole_list_of_the_start_counts(
    statuses: list[scheduler_pb2.StatusResponse],
    started_here: bool,
    known: set[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Impatient(Patience):
        """Whose time is over."""

        def __init__(self, _retry_for_s: float) -> None:
            super().__init__(0)

    monkeypatch.setattr(batch_fleet, "Patience", Impatient)
    async with serving_scheduler(FakeScheduler(*statuses)) as address:
        peers = Peers("127.0.0.1:1", address, 0.0)
        first = await served_models(peers, started_here, hush)
        assert first.names == {"a"}
        assert await look_again(peers, first, hush, {"b"}) == known


async def test_a_run_for_which_no_worker_is_connected_says_so(shell: Shell, tmp_path: Path) -> None:
    shell.queue.paused = True
    (tmp_path / "in").write_text(json.dumps(completion("a", "p", model="b")) + "\n")
    async with serving_scheduler(FakeScheduler(scheduler_pb2.StatusResponse())) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"),
            "--queue", shell.address, "--scheduler", address, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        async with asyncio.timeout(60):
            begun, said = await process.stderr.readline(), await process.stderr.readline()
        await shell.queue.finish_all()
        rest = (await process.communicate())[1]
    assert process.returncode == 0, rest
    assert (begun[:7], said) == (b"1 lines", b"waiting: no worker is connected\n")
    assert b"waiting" not in rest


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


def named(*lines: tuple[int, str]) -> Any:
    """Return who says that these lines wait, each for a model."""
    return lambda served: {model: line for line, model in lines if model not in served}


@pytest.fixture
def said_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[list[str]]]:
    monkeypatch.setattr(vain, "LOOK_EVERY_S", 0.001)

    async def said_of(scheduler: FakeScheduler, looks: int, unserved: Any, waiting: int = 1) -> list[str]:
        """Return what is said in so many looks at a scheduler, while so many lines wait at the queue."""
        said: list[str] = []
        queue = FakeQueue()
        queue.requests += [request_pb2.Request(request_id=str(line), batch="b") for line in range(waiting)]
        async with (
            serving(queue) as at, serving_scheduler(scheduler) as address, asyncio.timeout(20),
            telling_what_waits(Peers(at, address, 0.0), "b", unserved, "run it again", said.append),
        ):  # fmt: skip
            while scheduler.asked <= looks:
                await asyncio.sleep(0.001)
        return said

    return said_of


async def test_once_a_worker_is_there_it_is_said_which_lines_wait_for_none(said_of: Any) -> None:
    waiting = named((3, "a"), (7, "odd"))
    assert await said_of(FakeScheduler(young("a", up_s=60)), 3, waiting) == [
        "waiting: the model 'odd' is not served here (served: a), and line 7 asks for it; if no worker is to come that "
        "serves it, interrupt this and run it again: such lines are then answered with that error"
    ], "once, as long as nothing changes"
    both = await said_of(FakeScheduler(young("b", up_s=60), young("a", "b", up_s=60)), 4, waiting)
    assert [text.split(",")[0] for text in both] == [
        "waiting: the model 'a' is not served here (served: b)",
        "waiting: the model 'odd' is not served here (served: b)",
        "waiting: the model 'odd' is not served here (served: a",
    ]
    assert await said_of(FakeScheduler(young("a", up_s=60)), 3, named()) == []


async def test_nothing_is_said_of_a_fleet_that_may_not_be_whole(said_of: Any) -> None:
    assert await said_of(FakeScheduler(young("a"), young()), 3, named((7, "odd"))) == []


def drained(*models: str) -> scheduler_pb2.StatusResponse:
    """Return a fleet with drained workers of `models`, and one of "b" that is not."""
    status = young("b", up_s=60)
    status.workers.extend(scheduler_pb2.WorkerStatus(model=model, draining=True) for model in models)
    return status


UNDRAIN = "none takes more, until `penstock drain WORKER --undo` has one take requests again"


async def test_it_is_said_of_lines_that_all_workers_of_their_model_are_drained(said_of: Any) -> None:
    waiting = named((3, "a"), (4, "b"), (5, "odd"))
    said = await said_of(FakeScheduler(drained("a", "b")), 4, waiting)
    assert [text.split(": ", 1)[1] for text in said] == [
        f"all workers of the model 'a' are drained or ending, and line 3 asks for it: {UNDRAIN}",
        "the model 'odd' is not served here (served: a, b), and line 5 asks for it; if no worker is to come that "
        "serves it, interrupt this and run it again: such lines are then answered with that error",
    ]
    assert await said_of(FakeScheduler(drained("b")), 3, named((4, "b"))) == []


async def test_it_is_said_that_all_workers_are_drained_each_time_that_they_are(said_of: Any) -> None:
    none = scheduler_pb2.StatusResponse(workers=[scheduler_pb2.WorkerStatus(model="b", draining=True)])
    fleets = [none, none, drained(), none]
    said = await said_of(FakeScheduler(*fleets), 6, named((4, "b")))
    assert said == [f"waiting: all workers are drained or ending: {UNDRAIN}"] * 2


async def test_nothing_is_said_of_lines_that_run(said_of: Any) -> None:
    """A drained worker finishes what it has."""
    assert await said_of(FakeScheduler(drained("a")), 3, named((3, "a")), waiting=0) == []


async def test_a_run_begun_without_workers_tells_which_lines_they_do_not_serve_and_refuses_them_when_run_again(
    shell: Shell, tmp_path: Path
) -> None:
    shell.queue.paused = True
    (tmp_path / "in").write_text("".join(json.dumps(completion(name, name, model=name)) + "\n" for name in "ab"))
    scheduler = FakeScheduler(scheduler_pb2.StatusResponse())
    async with serving_scheduler(scheduler) as address:
        command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--scheduler", address]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", *command, "--queue", shell.address, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        async with asyncio.timeout(60):
            begun, none = await process.stderr.readline(), await process.stderr.readline()
            scheduler.statuses[:] = [young("b", up_s=60)]
            said = (await process.stderr.readline()).decode()
        assert (begun[:7], none) == (b"2 lines", b"waiting: no worker is connected\n")
        assert said.startswith("waiting: the model 'a' is not served here (served: b), and line 1 asks for it")
        assert "interrupt this and run the same command again" in said
        process.send_signal(signal.SIGINT)
        await process.communicate()
        await shell.queue.finish(shell.queue.requests[1])
        again = await shell.run(*command)
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(answer["error"] or {}).get("code") for answer in answers] == ["model_not_found", None], again.err
    assert "1 requests of lines with an error have not ended; the output has the errors" in again.err
