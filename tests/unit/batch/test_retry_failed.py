"""Lines that failed are run again when that is asked for, each once for every failure, and good answers stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.request.v1 import request_pb2
from tests.support.batch_lines import completion
from tests.support.fake_queue import completed
from tests.unit.batch.test_runner import Bench


def refusing(*texts: str) -> Any:
    """Return who rejects these prompts and answers others."""

    def answer(request: request_pb2.Request) -> request_pb2.Result:
        if request.text not in texts:
            return completed(request)
        error = request_pb2.RequestError(code="context_length_exceeded", message="too long", param="prompt")
        return request_pb2.Result(outcome=request_pb2.OUTCOME_REJECTED, error=error)

    return answer


def codes(bench: Bench) -> list[str | None]:
    return [(answer["error"] or {}).get("code") for answer in bench.answers()]


async def test_lines_that_failed_are_run_again_and_only_those(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    await bench.run()
    assert codes(bench) == ["context_length_exceeded", None]
    bench.queue.answer = completed
    tally = await bench.run()
    assert (tally.answered_earlier, tally.failed_earlier, codes(bench)[0]) == (2, 1, "context_length_exceeded")
    tally = await bench.run(retry_failed=True)
    assert (tally.answered_earlier, tally.failed_earlier, tally.requests, codes(bench)) == (1, 0, 1, [None, None])
    assert [request.text for request in bench.queue.requests] == ["x", "y", "x"]
    for again in (False, True):
        tally = await bench.run(retry_failed=again)
        assert (tally.answered_earlier, tally.failed_earlier, codes(bench)) == (2, 0, [None, None])
    assert len(bench.queue.requests) == 3, "the answers of the last run count"


async def test_a_line_that_fails_again_can_be_run_again_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x")])
    bench.queue.answer = refusing("x")
    await bench.run()
    for _ in range(2):
        tally = await bench.run(retry_failed=True)
        assert (dict(tally.outcomes), tally.failed_earlier) == ({"rejected": 1}, 0)
    keys = [request.idempotency_key for request in bench.queue.requests]
    assert len(set(keys)) == 3
    assert keys[1:] == [f"{keys[0]}:r-0", f"{keys[0]}:r-1"]


async def interrupted(bench: Bench, submitted: int, answered: int, **how: Any) -> None:
    """End a run that runs failed lines again once so much has happened; nothing is answered by the queue meanwhile."""
    bench.queue.paused = True
    run = asyncio.create_task(bench.run(retry_failed=True, **how))
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == submitted)
    async with asyncio.timeout(20):
        while bench.observer.answered != answered:
            await asyncio.sleep(0.01)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    bench.queue.paused = False


async def test_an_interrupted_retry_goes_on_with_what_it_had_submitted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    await bench.run()
    bench.queue.answer = completed
    await interrupted(bench, submitted=3, answered=2)
    again = asyncio.create_task(bench.run(retry_failed=True))
    async with asyncio.timeout(20):
        while len(bench.queue.watches) < 6:  # of each of three runs what there is, and what comes
            await asyncio.sleep(0.01)
    await bench.queue.finish_all()
    await again
    assert (len(bench.queue.requests), codes(bench)) == (3, [None, None])


async def test_after_an_interrupted_retry_the_plain_command_has_the_error_or_the_answer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    await bench.run()
    bench.queue.answer = completed
    await interrupted(bench, submitted=3, answered=2)
    await bench.run()
    assert codes(bench) == ["context_length_exceeded", None]
    assert bench.batch.late == 1, "who reads the error knows that an answer will come"
    await bench.queue.finish_all()
    await bench.run()
    assert (len(bench.queue.requests), codes(bench)) == (3, [None, None])
    assert bench.batch.late == 0


async def test_the_plain_command_has_what_an_interrupted_retry_left_behind_at_once(tmp_path: Path) -> None:
    """All lines have an answer in the journal by then, the errors of before."""
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    await bench.run()
    bench.queue.answer = completed
    await interrupted(bench, submitted=3, answered=2)
    await bench.queue.finish_all()
    tally = await bench.run()
    assert (len(bench.queue.requests), codes(bench), tally.failed_earlier) == (3, [None, None], 0)


async def test_a_line_that_could_not_even_be_sent_again_is_known_by_the_request_that_failed(tmp_path: Path) -> None:
    """The journal then has an answer of it that is of no request."""
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y", model="other")])
    bench.queue.answer = refusing("x", "y")
    await bench.run()
    bench.queue.answer = completed
    bench.observer.answered = 0
    await interrupted(bench, submitted=3, answered=1, served={"tiny"})
    await bench.queue.finish_all()
    await bench.run(retry_failed=True)
    assert (len(bench.queue.requests), codes(bench)) == (4, [None, None])
    assert bench.queue.requests[-1].idempotency_key.endswith(":2:r-1")


@pytest.mark.parametrize("begun_earlier", [False, True])
async def test_an_answer_that_comes_late_in_the_place_of_an_error_is_taken_by_a_run_of_other_lines(
    tmp_path: Path, begun_earlier: bool
) -> None:
    """Of a dead letter that somebody requeued, say, or of a retry that was interrupted."""
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 2)
    late, other = bench.queue.requests
    await bench.queue.finish(late)
    async with asyncio.timeout(20):
        while bench.observer.answered < 1:
            await asyncio.sleep(0)
    if begun_earlier:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        watches = len(bench.queue.watches)
        run = asyncio.create_task(bench.run())
        async with asyncio.timeout(20):
            while len(bench.queue.watches) < watches + 2:  # what there is by now, and what comes
                await asyncio.sleep(0)
    bench.queue.answer = completed
    await bench.queue.finish(late)
    await bench.queue.finish(other)
    tally = await run
    assert (codes(bench), tally.failed_earlier) == ([None, None], 0)
    assert bench.batch.late == 0


async def test_a_run_that_ends_with_errors_tells_how_many_requests_may_still_answer_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    bench.queue.answer = refusing("x")
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 2)
    late, other = bench.queue.requests
    await bench.queue.finish(late)
    again = request_pb2.Request()
    again.CopyFrom(late)
    again.request_id = "again"
    bench.queue.requests.append(again)
    await bench.queue.finish(other)
    await run
    assert (codes(bench), bench.batch.late) == (["context_length_exceeded", None], 1)
