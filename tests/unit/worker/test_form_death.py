"""Structured outputs are looked at in the tokenizer's process: whoever they end or hold up, it is not the worker."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import time
from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.worker.engine import PromptSpec, Rendered, RequestRefusedError
from services.worker.rendering import Rendering
from services.worker.simulated.engine import ByteRenderer
from services.worker.tokenizer import Refusal, TokenizerPool, failed
from tests.support.answered import Answered
from tests.support.gate import Gate
from tests.support.rendered import bytewise

FIELD = "sampling.structured_outputs"


class PanicError(BaseException):
    """What Python gets of a panic in Rust."""


def work_for(seconds: float) -> None:
    """Take so much time of a processor."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def abort() -> None:
    """End the process as a failed assertion of C does, without pytest's word on it."""
    faulthandler.disable()
    os.abort()


class Looking(ByteRenderer):
    """Does to its process what a form says, as the parsers and compilers of grammars might."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(1000)
        self._gate = gate

    def render(self, spec: PromptSpec) -> Rendered:
        if spec.text == "die":
            abort()
        if spec.text == "long":
            work_for(0.3)
        if spec.text == "stack":
            return Rendered(array("I", [resource.getrlimit(resource.RLIMIT_STACK)[0] >> 10]))
        return super().render(spec)

    def check_form(self, spec: PromptSpec, rendered: Rendered) -> None:
        assert rendered.token_ids, "it is looked at with its prompt"
        if spec.form == b"abort":
            abort()
        if spec.form == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if spec.form == b"panic":
            raise PanicError("index out of bounds")
        if spec.form == b"hang":
            self._gate.wait()
        if spec.form == b"spin":
            work_for(60)
        if spec.form == b"work":
            work_for(0.05)
        if spec.form == b"refuse":
            raise RequestRefusedError("invalid_parameter", "no such type", FIELD)
        if spec.form == b"defect":
            raise ZeroDivisionError("a defect")


class Started(Answered):
    """A pool with its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.pool = TokenizerPool.fork(lambda: Looking(self.gate))

    def render(self, **forms: str) -> None:
        for name, form in forms.items():
            self.pool.render(name, PromptSpec(text=name, form=form.encode()))


@pytest.fixture
def has_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is forked now."""
    monkeypatch.setattr("services.worker.tokenizer.FORM_CPU_S", 0.2)


@pytest_asyncio.fixture
async def started(has_little_time: None) -> AsyncIterator[Started]:
    started = Started()
    await started.pool.start(started.answer, started.died)
    yield started
    await started.pool.close()


def deadly(why: str) -> Refusal:
    """The answer to structured outputs that a process died of: no attempt will have another end."""
    return Refusal("invalid_parameter", f"the structured outputs cannot be looked at: {why}", FIELD, rejects=True)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("abort", "the process that did ended (signal 6)"),
        ("panic", "the process that did ended (exit status 1)"),
        ("spin", "it took over 0.2 s of processor time"),
    ],
)
async def test_what_they_end_or_hold_up_is_their_process_and_nobody_else(started: Started, form: str, why: str) -> None:
    _, first = started.pool.pids
    started.render(before="", beside="fine", deadly=form, after="fine", last="")
    await started.until(5)
    assert started.answers.pop("deadly") == deadly(why)
    assert started.answers == {n: Rendered(bytewise(n.encode())) for n in ("before", "beside", "after", "last")}
    assert started.pool.pids[1] != first
    assert not started.deaths


async def test_who_looked_when_its_process_was_killed_may_try_again(started: Started) -> None:
    """No form does that by itself: it was somebody else, or memory was short."""
    started.render(before="fine", innocent="killed", after="fine")
    await started.until(3)
    assert started.answers.pop("innocent") == failed("the process that rendered the prompt ended (signal 9)")
    assert started.answers == {n: Rendered(bytewise(n.encode())) for n in ("before", "after")}


async def test_what_waits_for_ever_without_work_is_given_up_too(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 5.0)
    started.render(before="fine")
    await started.until(1)
    started.render(stuck="hang", beside="fine")
    await started.gate.reached()
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 0.0)
    await started.until(2)
    monkeypatch.setattr("services.worker.tokenizer.STALLED_AFTER_S", 60.0)
    await started.until(3)
    assert started.answers["stuck"] == deadly("nothing was answered for 0 s")
    assert started.answers["beside"] == Rendered(bytewise(b"beside"))


async def test_a_refusal_is_the_request_s_and_a_defect_is_left_to_whoever_runs_it(started: Started) -> None:
    _, first = started.pool.pids
    started.render(wrong="refuse", odd="defect", well="fine")
    await started.until(3)
    assert started.answers == {
        "wrong": Refusal("invalid_parameter", "no such type", FIELD),
        "odd": Rendered(bytewise(b"odd")),
        "well": Rendered(bytewise(b"well")),
    }
    assert started.pool.pids[1] == first


@pytest.mark.parametrize("before", ["fine", "refuse", "defect"])
async def test_a_prompt_that_kills_after_forms_were_looked_at_is_blamed_itself(started: Started, before: str) -> None:
    started.render(first=before, die="fine")
    await started.until(2)
    answer = started.answers["die"]
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.param, answer.rejects) == ("tokenizer_error", "prompt", False)


async def test_each_has_its_own_time_and_what_follows_is_not_timed(started: Started) -> None:
    started.render(a="work", b="work", c="work", d="work", e="work", long="")
    await started.until(6)
    assert not [answer for answer in started.answers.values() if isinstance(answer, Refusal)]


async def test_who_has_looked_with_less_stack_than_the_worker_has_shown_that_the_worker_can(started: Started) -> None:
    """A successor has no less than the first."""
    started.render(stack="", deadly="abort")
    await started.until(2)
    usual, _ = resource.getrlimit(resource.RLIMIT_STACK)
    first = started.answers.pop("stack")
    assert isinstance(first, Rendered)
    assert 0 < first.token_ids[0] < (usual >> 10 if usual != resource.RLIM_INFINITY else 8192)
    started.render(stack="")
    await started.until(2)
    assert started.answers["stack"] == first


async def test_the_log_says_what_a_process_died_of(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    started.render(deadly="abort")
    await started.until(1)
    assert "deadly: a tokenizer process ended (signal 6) while it looked at the structured outputs" in caplog.text


async def test_one_that_nobody_waits_for_any_more_is_not_answered(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    started.render(stuck="hang")
    await started.gate.reached()
    started.pool.forget("stuck")
    os.kill(started.pool.pids[1], 9)
    started.render(well="fine")
    await started.until(1)
    assert list(started.answers) == ["well"]
    assert "while it rendered stuck in vain; another takes over" in caplog.text


async def test_they_are_never_looked_at_on_the_worker_s_own_thread(has_little_time: None) -> None:
    rendered: list[str | None] = []

    class Own(ByteRenderer):
        def render(self, spec: PromptSpec) -> Rendered:
            rendered.append(spec.text)
            return super().render(spec)

    answered, gate = Answered(), Gate()
    rendering = Rendering(TokenizerPool.fork(lambda: Looking(gate)), Own(1000))
    await rendering.start(answered.answer, answered.died)
    for count, (name, form) in enumerate([("well", b"fine"), ("deadly", b"abort"), ("plain", b"")], 1):
        rendering.render(name, PromptSpec(text=name, form=form))
        await answered.until(count)
    assert rendered == ["plain"], "and the one that is plain is, as ever"
    assert answered.answers["deadly"] == deadly("the process that did ended (signal 6)")
    await rendering.close()
