"""Drain, rolling restart, backup and restore, on real processes with simulated engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

import penstock as public
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_crashes import status
from tests.support.batch_lines import completion
from tests.support.fleet import Fleet, penstock, read_jsonl, write_jsonl
from tests.support.modules import python_path
from tests.support.waiting import wait_for_async

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(180)]

SLOW_FLAGS = [*SIMULATED_FLAGS, "--profile", "a100-llama-8b"]
"""Steps of some milliseconds, so that requests run for long enough to be met."""


async def state_of(fleet: Fleet, worker: str) -> tuple[bool, int]:
    """Return whether the worker drains, and its reservations; (False, -1) if the scheduler does not know it."""
    async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:
        for view in (await client.fleet()).workers:
            if view.worker_id == worker:
                return view.draining, view.reservations
    return False, -1


async def serves(fleet: Fleet, models: set[str]) -> bool:
    """Return whether the scheduler knows workers of just these models."""
    async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:
        return await client.models() == models


async def ended(fleet: Fleet) -> int:
    """Return how many requests of channel `batch` have ended in the present life of the queue."""
    async with public.Client(fleet.queue.address) as client:
        channels = (await client.stats()).channels
    return sum(sum(channel.ended_by_outcome) for channel in channels if channel.channel == "batch")


async def submit(fleet: Fleet, count: int, batch: str, max_tokens: int) -> None:
    async with public.Client(fleet.queue.address) as client:
        for i in range(count):
            await client.submit(
                prompt=f"{batch} {i}", max_tokens=max_tokens, ignore_eos=True, batch=batch, channel="batch",
                idempotency_key=f"{batch}-{i}", client_reference=str(i),
            )  # fmt: skip


async def results_of(fleet: Fleet, batch: str, count: int, cursor: int = 0) -> dict[str, public.Result]:
    found: dict[str, public.Result] = {}
    async with public.Client(fleet.queue.address, retry_for_s=60) as client:
        async for result in client.watch(batch=batch, cursor=cursor, follow=True):
            assert result.client_reference not in found, "one result per request"
            found[result.client_reference] = result
            if len(found) == count:
                break
    return found


async def test_a_drained_worker_finishes_and_stays_drained_over_a_new_scheduler(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    fleet.add_worker("w1", SLOW_FLAGS)
    scheduler = ["--scheduler", fleet.scheduler.address]
    await submit(fleet, 4, "first", 400)

    async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:

        async def all_run() -> bool:
            return [worker.engine.running for worker in (await client.fleet()).workers] == [4]

        await wait_for_async(all_run, "four requests to run")
        assert await client.drain_worker("w1") == 4, "what stood ready has been withdrawn"
        assert await state_of(fleet, "w1") == (True, 4)
    drained = await asyncio.to_thread(penstock, "drain", "w1", *scheduler)
    assert drained.stdout.startswith("w1 takes no new grants; "), drained.stderr
    assert drained.stdout.endswith("w1 is drained\n")
    await asyncio.to_thread(fleet.wait_settled)
    unknown = penstock("drain", "w9", *scheduler)
    assert (unknown.returncode, unknown.stderr) == (1, "penstock: worker_id: no worker is called 'w9'; known: w1\n")
    finished = await results_of(fleet, "first", 4)
    assert {result.outcome for result in finished.values()} == {public.Outcome.COMPLETED}, "it finished what it had"
    table = penstock("status", "--once", "--queue", fleet.queue.address, *scheduler)
    assert "drained" in table.stdout
    submitting = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "submit", "p", "--wait", "--max-tokens", "4", "--queue",
        fleet.queue.address, *scheduler, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert submitting.stderr is not None
    said = await asyncio.wait_for(submitting.stderr.readline(), 60)
    assert said.startswith(b"waiting: all workers are drained or ending"), said

    await submit(fleet, 3, "second", 4)
    fleet.scheduler.kill()
    fleet.scheduler.start()

    async def drains() -> bool:
        return await state_of(fleet, "w1") == (True, 0)

    await wait_for_async(drains, "the worker to tell the new scheduler that it drains")
    assert await ended(fleet) == 4, "and it got nothing"
    undone = penstock("drain", "w1", "--undo", *scheduler)
    assert undone.stdout == "w1 takes grants again\n", undone.stderr
    assert len(await results_of(fleet, "second", 3)) == 3
    assert (await submitting.communicate())[1] == b""
    assert submitting.returncode == 0


async def test_a_rolling_restart_under_load_is_not_noticed(make_fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """Every service is restarted by SIGTERM, one after the other, under a batch and under single requests."""
    fleet = make_fleet()
    for name in ("w1", "w2"):
        fleet.add_worker(name, [*SLOW_FLAGS, "--max-num-seqs", "16"])
    lines = [completion(f"line-{i}", f"prompt {i}", max_tokens=60, ignore_eos=True) for i in range(450)]
    source, target = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = ["--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address]
    batch = asyncio.create_task(asyncio.to_thread(penstock, "run-batch", "-i", str(source), "-o", str(target), *flags))
    rolled = asyncio.Event()

    async def singles() -> int:
        """Ask one request after the other, until all has been restarted; a failure of any raises."""
        answered = 0
        async with public.Client(fleet.queue.address) as client:
            while not rolled.is_set():
                result = await client.generate(prompt=f"single {answered}", max_tokens=8, channel="interactive")
                assert result.outcome is public.Outcome.COMPLETED
                answered += 1
        return answered

    async def some_end() -> bool:
        # Counts of the queue begin anew with each of its lives; that some ended means that requests flow.
        return await ended(fleet) > 0

    asking = asyncio.create_task(singles())
    for name in ("queue", "scheduler", "worker-w1", "worker-w2"):
        await wait_for_async(some_end, "requests to end before the next restart")
        assert not batch.done(), "the batch was over too soon: this proves nothing"
        assert await asyncio.to_thread(fleet.services[name].stop) == 0
        await asyncio.to_thread(fleet.services[name].start)
    assert not batch.done(), "the batch was over too soon: this proves nothing"
    rolled.set()
    assert await asking > 0
    ran = await batch
    assert ran.returncode == 0, ran.stderr + fleet.logs()
    answers = read_jsonl(target)
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines], "each once, in order"
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    now = status(fleet)
    assert now["scheduler"]["audit_violations"] == 0
    assert now["queue"]["dead"] == 0


async def test_a_model_whose_worker_comes_back_late_to_a_new_scheduler_is_not_refused(
    make_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet = make_fleet()
    for model in "ab":
        fleet.add_worker(model, ["--engine", "simulated", "--model", model])
    gateway = fleet.add_gateway()
    late = fleet.services["worker-b"].process
    assert late is not None
    late.send_signal(signal.SIGSTOP)
    fleet.scheduler.kill()
    fleet.scheduler.start()
    await wait_for_async(lambda: serves(fleet, {"a"}), "the first worker to be back")

    lines = [completion(model, "x", model=model, max_tokens=4) for model in "ab"]
    source, target = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = ["--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address]
    ran = asyncio.create_task(asyncio.to_thread(penstock, "run-batch", "-i", str(source), "-o", str(target), *flags))
    client = openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0, timeout=60)
    asked = asyncio.create_task(client.completions.create(model="b", prompt="x", max_tokens=4))
    file = await client.files.create(file=("in.jsonl", source.read_bytes()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    async def validated() -> bool:
        return (await client.batches.retrieve(batch.id)).status != "validating"

    await wait_for_async(validated, "the validation")
    assert await serves(fleet, {"a"}), "the second was back too soon: this proves nothing"
    late.send_signal(signal.SIGCONT)

    async def done() -> bool:
        return (await client.batches.retrieve(batch.id)).status in {"completed", "failed"}

    await wait_for_async(done, "the end of the batch")
    counts = (await client.batches.retrieve(batch.id)).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (2, 0)
    assert (await asked).model == "b"
    assert (await ran).returncode == 0, fleet.logs()
    assert [answer["error"] for answer in read_jsonl(target)] == [None, None]
    await client.close()


async def test_a_backup_under_load_becomes_a_queue_that_answers_everything(
    make_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet = make_fleet()
    fleet.add_worker("w1", SLOW_FLAGS)
    await submit(fleet, 40, "kept", 300)
    async with public.Client(fleet.queue.address) as client:
        made = await client.backup("b1")
    assert made.waiting + made.leased + made.results == 40
    path = Path(made.path)
    assert path == fleet.directory / "queue-backups" / "b1"
    taken = await asyncio.to_thread(penstock, "backup", "b1", "--queue", fleet.queue.address)
    assert (taken.returncode, taken.stderr) == (2, f"penstock: name: there is a backup {path} already\n")
    await submit(fleet, 1, "late", 4)
    before = await results_of(fleet, "kept", 40)

    assert penstock("verify-store", str(fleet.directory / "queue")).returncode == 69, "it is in use"
    verified = penstock("verify-store", str(path))
    assert (verified.returncode, verified.stdout.splitlines()[-1]) == (0, "no violations"), verified.stdout

    assert fleet.queue.stop() == 0
    clean = penstock("verify-store", str(fleet.directory / "queue"))
    assert (clean.returncode, clean.stdout.splitlines()[-1]) == (0, "no violations"), clean.stdout
    shutil.rmtree(fleet.directory / "queue")  # the disaster
    restored = penstock("restore", str(path), "--data-dir", str(fleet.directory / "queue"))
    assert restored.returncode == 0, restored.stderr
    fleet.queue.start()
    after = await results_of(fleet, "kept", 40)
    assert {name: result.text for name, result in after.items()} == {name: r.text for name, r in before.items()}
    newest = max(result.cursor for result in before.values())
    anew = {name for name, result in after.items() if result.cursor > newest}
    assert anew, "the backup was made too late: this proves nothing"
    assert set(await results_of(fleet, "kept", len(anew), cursor=newest)) == anew, "a cursor of the lost life is good"
    assert all(after[name].cursor == before[name].cursor for name in after.keys() - anew), "the rest is as it was"
    async with public.Client(fleet.queue.address) as client:
        with pytest.raises(public.NotFound):
            await client.get(idempotency_key="late-0")
