"""`--retry-failed` runs no line again of which nobody knows that it failed; the output that is there is known again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from penstock.request.v1 import request_pb2
from tests.support.batch_lines import completion
from tests.support.fake_queue import FakeQueue, completed, serving
from tests.support.shell import Shell
from tests.unit.cli.test_run_batch import NO_SCHEDULER, lines_in
from tests.unit.cli.test_run_batch_again import killed, killed_retry


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    queue = FakeQueue(but_the_first)
    async with serving(queue) as address:
        yield Shell(address, queue)


def but_the_first(request: request_pb2.Request) -> request_pb2.Result:
    result = completed(request)
    if request.text == "p 0":
        result.outcome = request_pb2.OUTCOME_EXPIRED
    return result


def command_in(directory: Path, lines: int = 40) -> list[str]:
    source = lines_in(directory / "in", lines)
    return ["run-batch", "-i", str(source), "-o", str(directory / "out"), *NO_SCHEDULER]


def answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out").read_text().splitlines()]


def forget(queue: FakeQueue, kept: Collection[str] = ()) -> None:
    """Have the queue know no request any more but those with these references."""
    known: list[request_pb2.Request | request_pb2.Result] = [*queue.requests, *queue.results]
    for one in known:
        if one.client_reference not in kept:
            queue.by_key.pop(one.idempotency_key, None)
            one.request_id = one.batch = "gone"


async def test_a_run_that_nobody_knows_is_not_retried(shell: Shell, tmp_path: Path) -> None:
    command = command_in(tmp_path)
    for _ in range(2):
        ran = await shell.run(*command, "--retry-failed")
        assert (ran.status, shell.queue.requests) == (2, [])
        assert "of 40 of 40 lines it is not known that they failed" in ran.err
        assert "without --retry-failed the same command runs these lines" in ran.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert (await shell.run(*command)).status == 0


@pytest.mark.parametrize("kept", [(), [str(line) for line in range(1, 31)]])
async def test_answers_that_only_the_output_has_are_kept_or_the_retry_is_refused(
    shell: Shell, tmp_path: Path, kept: Collection[str]
) -> None:
    command = command_in(tmp_path)
    assert (await shell.run(*command)).status == 0
    before = answers(tmp_path)
    shell.queue.answer = completed
    forget(shell.queue, kept)
    ran = await shell.run(*command, "--retry-failed")
    if kept:
        after = answers(tmp_path)
        assert (ran.status, after[1:], after[0]["error"]) == (0, before[1:], None)
        assert len(shell.queue.requests) == 41
    else:
        assert (ran.status, answers(tmp_path), len(shell.queue.requests)) == (2, before, 40)


async def test_results_that_are_gone_are_no_failures_where_the_output_was_moved(shell: Shell, tmp_path: Path) -> None:
    command = command_in(tmp_path)
    assert (await shell.run(*command)).status == 0
    forget(shell.queue, {str(line) for line in range(1, 31)})
    (tmp_path / "out").rename(tmp_path / "moved")
    ran = await shell.run(*command, "--retry-failed")
    assert (ran.status, "of 10 of 40 lines it is not known" in ran.err) == (2, True)
    (tmp_path / "moved").rename(tmp_path / "out")
    assert (await shell.run(*command, "--retry-failed")).status == 0
    assert len(shell.queue.requests) == 41


async def test_a_retry_that_was_killed_before_it_knew_all_is_refused_like_the_first(
    shell: Shell, tmp_path: Path
) -> None:
    command = command_in(tmp_path)
    assert (await shell.run(*command)).status == 0
    await killed_retry(shell, command, 41)
    journal = tmp_path / "out.partial"
    journal.write_text("".join(f"{line}\n" for line in journal.read_text().splitlines()[:12]))
    forget(shell.queue)
    (tmp_path / "out").unlink()
    ran = await shell.run(*command, "--retry-failed")
    assert (ran.status, "of 30 of 40 lines it is not known" in ran.err) == (2, True)


async def test_lines_that_never_had_a_request_are_retried(shell: Shell, tmp_path: Path) -> None:
    """As one for a model that nobody served then, or that the queue refused."""
    lines = [completion(f"c-{line}", f"p {line}", model=None) for line in range(3)]
    refused = [completion("zero", "p", model=None, max_tokens=1), *lines]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in refused))
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *NO_SCHEDULER]
    assert (await shell.run(*command)).status == 0
    had = answers(tmp_path)
    name = shell.queue.requests[0].batch
    had[0] |= {"id": f"vllm-{name}-1", "response": None, "error": {"code": "model_not_found"}}
    (tmp_path / "out").write_text("".join(json.dumps(line) + "\n" for line in had))
    forget(shell.queue, {"2", "3", "4"})
    shell.queue.answer = completed
    assert (await shell.run(*command, "--retry-failed")).status == 0
    assert [line["error"] for line in answers(tmp_path)] == [None] * 4
    assert [request.client_reference for request in shell.queue.requests[4:]] == ["1", "2"]


async def test_an_output_is_known_by_the_lines_that_were_retried_last(shell: Shell, tmp_path: Path) -> None:
    """Of all others the results are gone."""

    def but_the_sixth(request: request_pb2.Request) -> request_pb2.Result:
        result = completed(request)
        if request.text == "p 5":
            result.outcome = request_pb2.OUTCOME_EXPIRED
        return result

    shell.queue.answer = but_the_sixth
    command = command_in(tmp_path, 200)
    assert (await shell.run(*command)).status == 0
    before = answers(tmp_path)
    forget(shell.queue, {"6"})
    assert (await shell.run(*command, "--retry-failed")).status == 0
    assert len(shell.queue.requests) == 201
    after = answers(tmp_path)
    assert (after[:5], after[6:]) == (before[:5], before[6:])


@pytest.mark.parametrize("flags", [(), ("--retry-failed",)])
async def test_a_fresh_run_that_has_ended_is_what_the_same_command_goes_on_with(
    shell: Shell, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    command = command_in(tmp_path)
    assert (await shell.run(*command)).status == 0
    assert (await shell.run(*command, "--fresh")).status == 0
    before = answers(tmp_path)
    shell.queue.answer = completed
    ran = await shell.run(*command, *flags)
    after = answers(tmp_path)
    assert (ran.status, after[1:], (after[0]["error"] is None)) == (0, before[1:], bool(flags))
    assert len(shell.queue.requests) == 80 + bool(flags)
    assert len({request.batch for request in shell.queue.requests}) == 2
    said = "40 of 40 lines were answered earlier, 1 of them with an error; --retry-failed runs those again, --fresh all"
    assert (said in ran.err.splitlines()) == (not flags)


async def test_an_output_of_another_input_is_not_gone_on_with(shell: Shell, tmp_path: Path) -> None:
    assert (await shell.run(*command_in(tmp_path, 40), "--fresh")).status == 0
    command = command_in(tmp_path, 39)
    ran = await shell.run(*command, "--retry-failed")
    assert (ran.status, len(shell.queue.requests)) == (2, 40)
    assert (await shell.run(*command)).status == 0
    assert len(shell.queue.requests) == 79


async def test_retries_under_way_are_not_taken_for_lines_of_which_nothing_is_known(
    shell: Shell, tmp_path: Path
) -> None:
    command = command_in(tmp_path)
    assert (await shell.run(*command)).status == 0
    await killed_retry(shell, command, 41)
    for path in ("out", "out.partial"):
        (tmp_path / path).unlink()
    shell.queue.paused = False
    forget(shell.queue, {str(line) for line in range(1, 41)} - {"30"})
    ran = await shell.run(*command, "--retry-failed")
    assert (ran.status, "of 1 of 40 lines it is not known" in ran.err) == (2, True)
    assert len(shell.queue.requests) == 41


async def test_lines_under_way_are_known_where_the_journal_is_gone(shell: Shell, tmp_path: Path) -> None:
    command = command_in(tmp_path)
    await killed(shell, command, 40)
    (tmp_path / "out.partial").unlink()
    for request in shell.queue.requests[:30]:
        await shell.queue.finish(request)
    retry = asyncio.create_task(shell.run(*command, "--retry-failed"))
    async with shell.queue.changed:
        await shell.queue.changed.wait_for(lambda: len(shell.queue.requests) == 41)
    shell.queue.answer = completed
    await shell.queue.finish_all()
    assert (await retry).status == 0
    assert [line["error"] for line in answers(tmp_path)] == [None] * 40
    assert len(shell.queue.requests) == 41
