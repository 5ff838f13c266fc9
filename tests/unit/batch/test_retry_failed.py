"""Lines that failed are run again when that is asked for, each once for every failure, and good answers stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.batch.summary import Tally
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


async def begun(bench: Bench) -> tuple[asyncio.Task[Tally], request_pb2.Request, request_pb2.Request]:
    """Return a run whose two lines have been submitted, the first of which is to fail, and their requests."""
    bench.queue.answer = refusing("x")
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 2)
    first, second = bench.queue.requests
    return run, first, second


async def answered(bench: Bench, lines: int) -> None:
    async with asyncio.timeout(20):
        while bench.observer.answered < lines:
            await asyncio.sleep(0)


async def begun_again(bench: Bench, run: asyncio.Task[Tally], **how: Any) -> asyncio.Task[Tally]:
    """Return the run that goes on with one that is interrupted, once it watches."""
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    watches = len(bench.queue.watches)
    run = asyncio.create_task(bench.run(**how))
    async with asyncio.timeout(20):
        while len(bench.queue.watches) < watches + 2:  # what there is by now, and what comes
            await asyncio.sleep(0)
    return run


@pytest.mark.parametrize("begun_earlier", [False, True])
async def test_an_answer_that_comes_late_in_the_place_of_an_error_is_taken_by_a_run_of_other_lines(
    tmp_path: Path, begun_earlier: bool
) -> None:
    """Of a dead letter that somebody requeued, say, or of a retry that was interrupted."""
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    run, late, other = await begun(bench)
    await bench.queue.finish(late)
    await answered(bench, 1)
    if begun_earlier:
        run = await begun_again(bench, run)
    bench.queue.answer = completed
    await bench.queue.finish(late)
    await bench.queue.finish(other)
    tally = await run
    assert (codes(bench), tally.failed_earlier) == ([None, None], 0)
    assert bench.batch.late == 0


async def test_a_run_that_ends_with_errors_tells_how_many_requests_may_still_answer_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    run, late, other = await begun(bench)
    await bench.queue.finish(late)
    again = request_pb2.Request()
    again.CopyFrom(late)
    again.request_id = "again"
    bench.queue.requests.append(again)
    await bench.queue.finish(other)
    await run
    assert (codes(bench), bench.batch.late) == (["context_length_exceeded", None], 1)


def counted(tally: Tally) -> tuple[int, dict[str, int], int, int]:
    """Return what the summary says of how many lines."""
    assert tally.requests == tally.outcomes.total()
    return tally.requests, dict(tally.outcomes), tally.bad_lines, tally.answered_earlier


@pytest.mark.parametrize("begun_earlier", [False, True])
@pytest.mark.parametrize("again", [refusing("x"), completed])
async def test_a_line_that_is_answered_again_is_counted_once_and_as_its_last_answer_says(
    tmp_path: Path, begun_earlier: bool, again: Any
) -> None:
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    run, late, other = await begun(bench)

    def granted(request: request_pb2.Request) -> request_pb2.Result:
        result: request_pb2.Result = answer(request)
        result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens = 5, 3, 2
        result.timings.delivered_unix_ns = 1
        return result

    answer, bench.queue.answer = refusing("x"), granted
    await bench.queue.finish(late)
    await answered(bench, 1)
    if begun_earlier:
        run = await begun_again(bench, run)
    answer = again
    await bench.queue.finish(late)
    answer = refusing("y")
    await bench.queue.finish(other)
    tally = await run
    outcomes = {"completed": 1, "rejected": 1} if again is completed else {"rejected": 2}
    assert counted(tally) == (2, outcomes, 0, 0)
    assert (tally.failed_earlier, tally.granted_here) == (0, 1 if begun_earlier else 2)
    assert (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (10, 6, 4)


async def test_a_wrong_line_is_none_any_more_once_a_request_that_it_had_earlier_is_answered(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x", model="other"), completion("b", "y")])
    run, late, other = await begun(bench)
    run = await begun_again(bench, run, served={"tiny"})
    await answered(bench, 1)
    assert bench.batch.tally.bad_lines == 1
    bench.queue.answer = completed
    await bench.queue.finish(late)
    await bench.queue.finish(other)
    assert (counted(await run), codes(bench)) == ((2, {"completed": 2}, 0, 0), [None, None])


async def test_a_line_is_counted_once_too_where_the_queues_clock_is_behind(tmp_path: Path) -> None:
    """By which all of it ended before the run began."""
    bench = Bench(tmp_path, [completion("a", "x"), completion("b", "y")])
    run, late, other = await begun(bench)

    def earlier(request: request_pb2.Request) -> request_pb2.Result:
        result: request_pb2.Result = refusing("x")(request)
        result.timings.completed_unix_ns = 1
        return result

    await bench.queue.finish(late)
    await answered(bench, 1)
    assert counted(bench.batch.tally) == (1, {"rejected": 1}, 0, 0)
    bench.queue.answer = earlier
    for request in (late, late, other):
        await bench.queue.finish(request)
    tally = await run
    assert (counted(tally), tally.failed_earlier) == ((2, {"rejected": 1, "completed": 1}, 0, 0), 0)
