"""A batch run against a queue in memory: every line exactly one answer, whatever breaks."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.batch.journal import Header, Journal, JournalWriteError, journal_path, write_output
from penstock.batch.reader import InputFile, InputReadError
from penstock.batch.runner import BatchRun, LookAgain, Plan, batch_name, fresh_name
from penstock.batch.summary import Tally
from penstock.request.v1 import request_pb2
from tests.support.batch_lines import chat, completion, mixed, text_of
from tests.support.fake_queue import FakeQueue, completed, serving


class Count:
    """Notes the progress, and says when enough is answered."""

    def __init__(self, enough: int = 10**9) -> None:
        self.answered = 0
        self.passed_lines = 0
        self.enough = enough
        self.reached = asyncio.Event()

    def progressed(self, answered: int, tally: Tally) -> None:
        self.answered = answered
        if answered >= self.enough:
            self.reached.set()

    def not_read(self, names: Sequence[str], line: int) -> None:
        raise AssertionError(names)

    def passed(self, lines: int) -> None:
        self.passed_lines = lines

    def waits(self, why: str) -> None:
        raise AssertionError(why)


class Bench:
    """A file, its journal and a fake queue."""

    def __init__(self, directory: Path, lines: list[Any]) -> None:
        self.output = directory / "out.jsonl"
        path = directory / "in.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        self.source = InputFile(path)
        self.queue = FakeQueue()
        self.observer = Count()

    async def run(
        self,
        served: set[str] | None = None,
        channel: str = "batch",
        look_again: LookAgain | None = None,
        retry_failed: bool = False,
        look_every_s: float = 30.0,
    ) -> Tally:
        """Run to the end and write the output."""
        journal = Journal(journal_path(self.output), self.source)
        try:
            name = batch_name(self.output, self.source, "")
            journal.start(Header(name, name, self.queue.store_id, self.source.sha256))
            async with serving(self.queue) as address, penstock.Client(address, retry_for_s=20) as client:
                plan = Plan(name, channel, "", served, retry_failed, look_again, look_every_s)
                run = self.batch = BatchRun(client, self.source, journal, plan, self.observer)
                await run.run()
            write_output(journal, self.source, self.output)
            return run.tally
        finally:
            journal.close()

    def answers(self) -> list[dict[str, Any]]:
        """Return the output lines."""
        return [json.loads(line) for line in self.output.read_text().splitlines()]


async def test_every_line_gets_its_answer_in_input_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(300))
    tally = await bench.run()
    answers = bench.answers()
    assert [a["custom_id"] for a in answers] == [f"line-{i}" for i in range(300)]
    assert all(a["error"] is None and a["response"]["status_code"] == 200 for a in answers)
    assert text_of(answers[0]) == bench.queue.requests[0].text.upper()
    assert tally.requests == tally.outcomes["completed"] == 300
    assert tally.completion_tokens == sum(len(r.choices[0].token_ids) for r in bench.queue.results)
    assert {r.channel for r in bench.queue.requests} == {"batch"}
    assert len({r.batch for r in bench.queue.requests}) == 1


async def test_wrong_lines_are_answered_and_the_rest_runs(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path,
        [
            completion("a", "x"),
            b"{broken\n",
            b"\n",
            completion("a", "again"),
            completion("m", "x", model="other"),
            completion("s", "\ud800"),
            chat("z", "y"),
        ],
    )
    tally = await bench.run(served={"tiny"})
    answers = bench.answers()
    assert [(a["custom_id"], (a["error"] or {}).get("line")) for a in answers] == [
        ("a", None), (None, 2), ("a", 4), ("m", 5), ("s", 6), ("z", None),
    ]  # fmt: skip
    assert answers[3]["error"]["code"] == "model_not_found"
    assert "tiny" in answers[3]["error"]["message"]
    assert answers[4]["error"]["param"] == "body.prompt"
    assert (tally.bad_lines, tally.requests) == (4, 2)


async def test_a_model_is_looked_for_again_before_its_lines_are_refused(tmp_path: Path) -> None:
    lines = [
        completion(name, name, model=model)
        for name, model in zip("abcdab", ("x", "tiny", "y", "tiny", "y", "x"), strict=True)
    ]
    bench = Bench(tmp_path, lines)
    asked: list[tuple[set[str], int]] = []

    async def look_again(models: Collection[str]) -> set[str]:
        asked.append((set(models), len(bench.queue.requests)))
        return {"tiny", "y"}

    await bench.run(served={"tiny"}, look_again=look_again)
    assert [models for models, _ in asked] == [{"x", "y"}], "once for all lines"
    answers = bench.answers()
    assert [(answer["error"] or {}).get("code") for answer in answers] == [
        "model_not_found", None, None, None, "duplicate_custom_id", "duplicate_custom_id",
    ]  # fmt: skip
    assert "(served: tiny, y)" in answers[0]["error"]["message"]
    assert [text_of(answers[line]) for line in (1, 2, 3)] == ["B", "C", "D"], "each answer is of its line"


async def test_where_it_turns_out_not_to_be_known_what_is_served_no_line_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x", model="other")])

    async def look_again(models: Collection[str]) -> None:
        """Say that nobody knows."""

    assert (await bench.run(served={"tiny"}, look_again=look_again)).bad_lines == 0


async def test_a_line_that_an_earlier_run_had_answered_meanwhile_is_not_judged_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x", model="other"), completion("b", "y", model="gone")])
    await bench.run(served={"other"})
    bench.output.unlink()
    journal_path(bench.output).unlink(missing_ok=True)
    bench.observer.answered = 0

    async def look_again(models: Collection[str]) -> set[str]:
        """Say that nobody serves any of them, once the queue has told what became of the first."""
        async with asyncio.timeout(30):
            while not bench.observer.answered:
                await asyncio.sleep(0.01)
        return set()

    assert (await bench.run(served=set(), look_again=look_again)).bad_lines == 1


async def test_which_models_lines_wait_for_is_known_while_they_have_no_answer(tmp_path: Path) -> None:
    lines = [completion(name, name, model=model) for name, model in zip("abcd", ("x", "y", "x", None), strict=True)]
    bench = Bench(tmp_path, lines)
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 4)
    assert bench.batch.unserved(()) == {"x": 1, "y": 2}
    assert bench.batch.unserved({"x"}) == {"y": 2}
    for request in bench.queue.requests[:2]:
        await bench.queue.finish(request)
    async with asyncio.timeout(20):
        while bench.observer.answered < 2:
            await asyncio.sleep(0)
    assert bench.batch.unserved(()) == {"x": 3}
    await bench.queue.finish_all()
    await run
    assert bench.batch.unserved(()) == {}


async def test_who_asks_again_what_lines_wait_for_does_not_pay_for_those_that_have_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, [completion(f"line-{line}", str(line), model="x") for line in range(100)])
    bench.queue.paused = True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 100)
    for request in bench.queue.requests[:98]:
        await bench.queue.finish(request)
    async with asyncio.timeout(20):
        while bench.observer.answered < 98:
            await asyncio.sleep(0)
    assert bench.batch.unserved(()) == {"x": 99}
    looked_at, is_answered = list[int](), Journal.is_answered

    def looking(journal: Journal, line: int) -> bool:
        looked_at.append(line)
        return is_answered(journal, line)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "is_answered", looking)
        assert bench.batch.unserved(()) == {"x": 99}
    assert looked_at == [99]
    await bench.queue.finish_all()
    await run
    assert bench.batch.unserved(()) == {}


async def test_a_file_of_wrong_lines_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [b"1\n", b"2\n"])
    assert (await bench.run()).bad_lines == 2
    assert bench.queue.requests == []


@pytest.mark.parametrize("lines", [[], [b"\n\n"]])
async def test_an_empty_file_gives_an_empty_output(tmp_path: Path, lines: list[Any]) -> None:
    bench = Bench(tmp_path, lines)
    await bench.run()
    assert bench.output.read_bytes() == b""


async def test_streams_that_break_lose_and_repeat_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(400))
    bench.queue.break_submit_after_acks = 100
    bench.queue.break_watch_after_results = 50
    await bench.run()
    assert len(bench.answers()) == len(bench.queue.requests) == 400


async def test_a_killed_run_is_resumed_without_asking_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(200))
    bench.observer = Count(enough=80)
    first = asyncio.create_task(bench.run())
    await bench.observer.reached.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert not bench.output.exists()
    before = bench.queue.watches[-1].cursor
    await bench.run()
    assert [a["custom_id"] for a in bench.answers()] == [f"line-{i}" for i in range(200)]
    assert len(bench.queue.requests) == 200, "no line ran twice"
    assert bench.queue.watches[-1].cursor > before, "the watch went on where it was"
    assert not journal_path(bench.output).exists()


async def test_an_input_that_changes_ends_the_run_and_leaves_nothing_wrong_behind(tmp_path: Path) -> None:
    # Far more in a line than what is read ahead of one.
    bench = Bench(tmp_path, [completion(f"line-{i}", f"{i} " * 200_000) for i in range(4)])
    path = tmp_path / "in.jsonl"
    content = path.read_bytes()
    bench.queue.paused = True
    first = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 4)
    path.write_bytes(content[: len(content) // 2])
    bench.queue.paused = False
    await bench.queue.finish_all()
    with pytest.raises(InputReadError, match=r"^line 3 of .* has changed"):
        await first
    with pytest.raises(InputReadError, match=r"^line 3 of .* has changed"):
        await bench.run()
    path.write_bytes(content)
    await bench.run()
    assert [(a["custom_id"], a["error"]) for a in bench.answers()] == [(f"line-{i}", None) for i in range(4)]
    assert len(bench.queue.requests) == 4


async def test_an_answer_to_a_line_that_is_not_taken_is_an_error_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [completion("a", "x", shiny=1)])
    journal = Journal(journal_path(bench.output), bench.source)
    journal.start(Header("k", "b", "fake", bench.source.sha256))
    async with penstock.Client("127.0.0.1:1") as client:
        run = BatchRun(client, bench.source, journal, Plan("b", "batch", "", None), bench.observer)
        run._answered(5, request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED, client_reference="1"))
    assert (journal.out(1)["error"]["param"], run.tally.bad_lines, run.tally.requests) == ("body.shiny", 1, 0)
    journal.close()


async def test_a_queue_that_comes_back_with_another_store_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(30))
    bench.queue.paused = True
    bench.queue.break_watch_after_results = 0
    first = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 30)
    bench.queue.store_id = "another"
    bench.queue.by_key.clear()
    bench.queue.paused = False
    await bench.queue.finish_all()
    with pytest.raises(penstock.ServiceError, match=r"another store .* the same command without --fresh"):
        await first
    bench.queue.requests.clear()
    bench.queue.results.clear()
    await bench.run()
    assert [a["custom_id"] for a in bench.answers()] == [f"line-{i}" for i in range(30)]


async def test_a_second_run_reads_the_answers_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(20))

    def earlier(request: request_pb2.Request) -> request_pb2.Result:
        result = completed(request)
        result.timings.completed_unix_ns = 1
        return result

    bench.queue.answer = earlier
    tally = await bench.run()
    assert (tally.answered_earlier, tally.requests) == (0, 20), "whatever the queue's clock says"
    first = bench.output.read_bytes()
    tally = await bench.run()
    assert (tally.answered_earlier, tally.requests) == (20, 0)
    assert bench.output.read_bytes() == first
    assert len(bench.queue.requests) == 20


async def test_a_journal_that_fails_twice_at_once_fails_the_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, mixed(1))
    journal = Journal(journal_path(bench.output), bench.source)
    run = BatchRun(penstock.Client("127.0.0.1:1"), bench.source, journal, Plan("b", "batch", "", None), bench.observer)
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    async def fail() -> None:
        raise JournalWriteError("full")

    async def nothing() -> None:
        """Have nothing to tell of earlier runs."""

    monkeypatch.setattr(run, "_catch_up", nothing)
    for part in ("_submit", "_watch"):
        monkeypatch.setattr(run, part, fail)
    with pytest.raises(JournalWriteError):
        await run.run()
    gc.collect()
    assert unheard == []
    journal.close()


async def test_failed_requests_are_error_lines(tmp_path: Path) -> None:
    ends = {"a": request_pb2.OUTCOME_REJECTED, "b": request_pb2.OUTCOME_DEAD, "c": request_pb2.OUTCOME_EXPIRED}

    def fail(request: request_pb2.Request) -> request_pb2.Result:
        error = request_pb2.RequestError(code="context_length_exceeded", message="512 is too much", param="prompt")
        return request_pb2.Result(outcome=ends[request.text], error=error if request.text == "a" else None)

    bench = Bench(tmp_path, [completion(name, name) for name in "abc"])
    bench.queue.answer = fail
    tally = await bench.run()
    rejected, died, expired = bench.answers()
    assert rejected["response"]["status_code"] == 400
    inner = rejected["response"]["body"]["error"]
    assert (inner["code"], inner["param"]) == ("context_length_exceeded", "prompt")
    assert rejected["error"] == {
        "code": "context_length_exceeded", "message": "512 is too much", "param": "body.prompt", "line": 1,
    }  # fmt: skip
    assert (died["response"]["status_code"], expired["response"]["status_code"]) == (500, 408)
    assert dict(tally.outcomes) == {"rejected": 1, "dead": 1, "expired": 1}


async def test_an_unknown_channel_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mixed(3))
    with pytest.raises(penstock.InvalidRequest, match="channel"):
        await bench.run(channel="nowhere")


def test_the_batchs_name_depends_on_path_content_and_model(tmp_path: Path) -> None:
    one = Bench(tmp_path, [completion("a", "x")])
    name = batch_name(one.output, one.source, "")
    assert name == batch_name(one.output, one.source, "")
    assert name.startswith("rb-")
    others = {
        batch_name(tmp_path / "other", one.source, ""),
        batch_name(one.output, one.source, "m"),
        fresh_name(name),
        batch_name(one.output, Bench(tmp_path, [completion("a", "y")]).source, ""),
    }
    assert len(others | {name}) == 5


def test_a_batchs_name_takes_any_path_and_stays_what_it_is(tmp_path: Path) -> None:
    source = Bench(tmp_path, [completion("a", "x")]).source
    assert batch_name(Path("/é/out"), source, "é") == "rb-e0a64aee024222a4"
    names = {batch_name(Path(os.fsdecode(b"/" + byte)), source, "") for byte in (b"\xfe", b"\xff", b"\xc3\xbf")}
    assert len(names) == 3


async def test_only_what_was_submitted_in_the_run_must_have_had_a_grant_in_it(tmp_path: Path) -> None:
    lines = ["old", "new", "rejected"]

    def timed(request: request_pb2.Request) -> request_pb2.Result:
        result = completed(request)
        result.timings.submitted_unix_ns = time.time_ns() + 10**12  # by the queue's clock
        result.timings.delivered_unix_ns = 0 if request.text == "rejected" else 1
        return result

    bench = Bench(tmp_path, [completion(name, name) for name in lines])
    bench.queue.answer, bench.queue.paused = timed, True
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 3)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    for request in bench.queue.requests[1:]:
        del bench.queue.by_key[request.idempotency_key]
    del bench.queue.requests[1:]
    run = asyncio.create_task(bench.run())
    async with bench.queue.changed:
        await bench.queue.changed.wait_for(lambda: len(bench.queue.requests) == 3)
    await bench.queue.finish_all()
    tally = await run
    assert (tally.requests, tally.granted_here) == (3, 1)
