"""A tokenizer process that dies or stalls has a successor, and only the prompt that it died of pays for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from services.worker import nursery
from services.worker.engine import CheckingRenderer, PromptSpec, Rendered
from services.worker.simulated.engine import ByteRenderer
from services.worker.tokenizer import Refusal, TokenizerPool
from tests.support.answered import Answered
from tests.support.fleet import alive
from tests.support.gate import Gate, Gated
from tests.support.rendered import bytewise
from tests.support.waiting import wait_for_async


class Deadly(ByteRenderer):
    """Takes its process with it on one word, as the OOM killer does, and on another as Rust does."""

    def render(self, spec: PromptSpec) -> Rendered:
        if spec.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.text == "panic":
            raise BaseException("retry-limit-in-match over")
        return super().render(spec)


class Started(Answered):
    """A pool with its answers."""

    def __init__(self, make_renderer: Callable[[], CheckingRenderer], count: int = 1, load_s: float = 300.0) -> None:
        super().__init__()
        self.pool = TokenizerPool.fork(make_renderer, count, load_s)

    async def start(self) -> Started:
        await self.pool.start(self.answer, self.died)
        return self

    def render(self, *texts: str) -> None:
        for text in texts:
            self.pool.render(text, PromptSpec(text=text))


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    started = await Started(lambda: Deadly(1000)).start()
    yield started
    await started.pool.close()


def killer(why: str) -> Refusal:
    """The answer to the prompt that a process died of."""
    return Refusal("tokenizer_error", f"the process that rendered the prompt ended ({why})", "prompt", rejects=False)


@pytest.mark.parametrize(("word", "why"), [("die", "signal 9"), ("panic", "exit status 1")])
async def test_the_prompt_that_it_died_of_has_failed_and_all_others_are_rendered(
    started: Started, word: str, why: str
) -> None:
    names = [f"{number}" for number in range(20)]
    started.render(*names[:10], word, *names[10:])
    await started.until(21)
    assert started.answers.pop(word) == killer(why)
    assert started.answers == {name: Rendered(bytewise(name.encode())) for name in names}
    assert not started.deaths
    started.render("after")
    await started.until(21)


async def test_each_of_several_deadly_ones_has_failed(started: Started) -> None:
    for number in range(3):
        for name in (f"d{number}", f"p{number}"):
            started.pool.render(name, PromptSpec(text="die" if name[0] == "d" else name))
    await started.until(6)
    assert [name for name, answer in started.answers.items() if answer == killer("signal 9")] == ["d0", "d1", "d2"]


async def test_one_that_is_killed_at_rest_costs_nobody_anything(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    started.render("before")
    await started.until(1)
    _, first = started.pool.pids
    os.kill(first, signal.SIGKILL)
    await wait_for_async(lambda: _is(started.pool.pids[1] != first), "its successor")
    started.render("after")
    await started.until(2)
    assert started.answers["after"] == Rendered(bytewise(b"after"))
    assert "a tokenizer process ended (signal 9); another takes over" in caplog.text
    assert not started.deaths


async def test_a_prompt_nobody_waits_for_any_more_is_named_and_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    started = await Started(lambda: Gated(gate)).start()
    started.render("wait")
    await gate.reached()
    started.pool.forget("wait")
    started.render("well")
    os.kill(started.pool.pids[1], signal.SIGKILL)
    await started.until(1)
    assert list(started.answers) == ["well"]
    assert "while it rendered wait in vain; another takes over" in caplog.text
    await started.pool.close()


async def test_one_that_answers_nothing_for_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 5.0)
    gate = Gate()
    started = await Started(lambda: Gated(gate)).start()
    _, first = started.pool.pids
    started.render("before")
    await started.until(1)
    started.render("wait")
    await gate.reached()
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 0.0)
    await started.until(2)
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 60.0)
    assert not alive(first)
    started.render("well")
    await started.until(3)
    assert started.answers == {
        "before": Rendered(bytewise(b"before")),
        "wait": killer("nothing was answered for 0 s"),
        "well": Rendered(bytewise(b"well")),
    }
    await started.pool.close()


async def test_while_it_loads_and_while_it_has_nothing_to_do_it_may_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 0.0)  # it is looked at in every turn of the loop
    gate = Gate()

    def load() -> CheckingRenderer:
        gate.wait()
        return ByteRenderer(1000)

    started = await Started(load).start()
    first = started.pool.pids[1]
    started.render("early")
    await gate.reached()
    await turns(1000)
    assert started.pool.pids[1] == first
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 60.0)
    gate.open()
    await started.until(1)
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 0.0)
    await turns(1000)
    assert started.pool.pids[1] == first
    assert not started.deaths
    await started.pool.close()


async def test_a_first_one_that_does_not_load_in_time_ends_the_worker() -> None:
    gate = Gate()

    def load() -> CheckingRenderer:
        gate.wait()
        return ByteRenderer(1000)

    started = await Started(load, 2, load_s=0.2).start()
    gate.open()  # for one of the two
    started.render("early", "too")
    loaded = asyncio.create_task(started.pool.loaded())
    await started.until(deaths=1)
    assert set(started.deaths) == {"a tokenizer process has not loaded within 0.2 s"}
    assert not loaded.done()
    loaded.cancel()
    await started.pool.close()


def have_little_time(pool: TokenizerPool) -> None:
    """Have those who come load in a moment; those who are there have done it."""
    for process in pool._processes:
        process._load_s = 0.2


async def test_a_successor_that_does_not_load_in_time_ends_the_worker() -> None:
    gate = Gate()

    def load() -> CheckingRenderer:
        gate.wait()
        return ByteRenderer(1000)

    started = await Started(load).start()
    gate.open()
    await started.pool.loaded()
    have_little_time(started.pool)
    os.kill(started.pool.pids[1], signal.SIGKILL)
    started.render("late")
    await started.until(deaths=1)
    assert started.deaths == ["a tokenizer process has not loaded within 0.2 s"]
    assert not started.answers
    await started.pool.close()


async def test_so_does_a_nursery_that_does_not_answer_in_time(started: Started) -> None:
    await started.pool.loaded()
    have_little_time(started.pool)
    nursery_pid, pid = started.pool.pids
    os.kill(nursery_pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    await started.until(deaths=1)
    assert started.deaths == ["a tokenizer process has not loaded within 0.2 s"]


async def test_where_no_time_is_set_loading_is_waited_for() -> None:
    gate = Gate()

    def load() -> CheckingRenderer:
        gate.wait()
        return ByteRenderer(1000)

    started = await Started(load, load_s=0.0).start()
    await gate.reached()
    await turns(1000)
    gate.open()
    await started.pool.loaded()
    assert not started.deaths
    await started.pool.close()


async def test_one_that_nothing_ends_holds_up_neither_its_successor_nor_those_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel, which SIGKILL does not end either."""
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 2.0)
    gate = Gate()
    with monkeypatch.context() as patched:
        patched.setattr("services.worker.nursery.os.kill", lambda *_: None)
        patched.setattr("services.worker.nursery.END_LOOKS", 10)
        started = Started(lambda: Gated(gate), 2)
    await started.start()
    await started.pool.loaded()
    _, stuck, other = started.pool.pids
    started.render("wait")
    await gate.reached()
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 0.0)
    await wait_for_async(lambda: _is("wait" in started.answers), "the stalled one to be given up")
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 60.0)
    assert alive(stuck)
    os.kill(other, signal.SIGKILL)
    await wait_for_async(lambda: _is(other not in started.pool.pids), "the other's successor")
    await started.pool.loaded()
    started.render("a", "b")
    await started.until(3)
    assert not started.deaths
    await started.pool.close()
    await wait_for_async(lambda: _is(not alive(stuck)), "its end")


async def test_one_that_cannot_load_ends_the_worker() -> None:
    def load() -> CheckingRenderer:
        raise ZeroDivisionError("no such model")

    started = await Started(load).start()
    started.render("early")
    await started.until(deaths=1)
    assert started.deaths == ["the tokenizer process ended before it had loaded (exit status 1)"]
    assert not started.answers
    await started.pool.close()


async def test_without_the_nursery_there_is_no_other(started: Started) -> None:
    started.render("before")
    await started.until(1)
    os.kill(started.pool.pids[0], signal.SIGKILL)
    await started.until(deaths=1)
    assert started.deaths[0].startswith("the tokenizer process is gone, and there can be no other: ")


async def test_of_two_the_other_goes_on_meanwhile() -> None:
    gate = Gate()

    def load() -> CheckingRenderer:
        gate.wait()
        return Deadly(1000)

    started = await Started(load, 2).start()
    for _ in range(2):
        await gate.reached()
        gate.open()
    started.render("die", "0")
    await gate.reached()  # the successor loads
    await started.until(2)
    assert started.answers == {"die": killer("signal 9"), "0": Rendered(bytewise(b"0"))}
    await started.pool.close()


async def test_they_end_with_the_nursery() -> None:
    started = await Started(lambda: ByteRenderer(100), 2).start()
    started.render("a", "b")
    await started.until(2)
    pids = started.pool.pids
    await started.pool.close()
    await wait_for_async(lambda: _is(not any(map(alive, pids))), "their end")


def test_it_is_the_same_on_the_loop_of_the_services() -> None:
    """Their sockets are not asyncio's own."""

    async def run(started: Started) -> None:
        await started.start()
        started.render("die", "well")
        await started.until(2)
        await started.pool.close()

    started = Started(lambda: Deadly(1000))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(started))
    assert started.answers == {"die": killer("signal 9"), "well": Rendered(bytewise(b"well"))}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _is(fact: bool) -> bool:
    return fact


@pytest.mark.parametrize(("error", "tells"), [(BrokenPipeError("gone"), False), (RuntimeError("a defect"), True)])
def test_a_process_whose_worker_has_ended_says_nothing_of_it(
    error: Exception, tells: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr("services.worker.nursery.os._exit", statuses.append)
    monkeypatch.setattr("services.worker.nursery.gc.freeze", lambda: None)
    monkeypatch.setattr("services.worker.nursery.signal.signal", lambda *_: None)
    monkeypatch.setattr("services.worker.nursery.die_with_parent", lambda: None)

    def work() -> None:
        raise error

    run: Any = nursery._run
    run(work)
    assert statuses == [1]
    assert ("Traceback" in caplog.text) is tells
