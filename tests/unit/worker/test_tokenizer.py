"""The tokenizer's process: order, errors, batches, large prompts, death."""

from __future__ import annotations

import gc
import os
import signal
from array import array
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.worker.engine import PromptSpec, Rendered
from services.worker.simulated_engine import ByteRenderer
from services.worker.tokenizer import ANSWER_AFTER_NS, Answer, Refusal, TokenizerProcess, some_answers
from tests.support.answered import Answered
from tests.support.rendered import bytewise


class Brittle(ByteRenderer):
    """Breaks, as a template might, on one word."""

    def render(self, spec: PromptSpec) -> Rendered:
        if spec.text == "break":
            raise ZeroDivisionError("broken template")
        return super().render(spec)


class Frozen(ByteRenderer):
    """Answers with the number of objects that its process does not look at for garbage."""

    def render(self, spec: PromptSpec) -> Rendered:
        return Rendered(array("I", [gc.get_freeze_count()]), None)


class Started(Answered):
    """A process with its answers."""

    def __init__(self, process: TokenizerProcess) -> None:
        super().__init__()
        self.process = process


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    started = Started(TokenizerProcess.fork(lambda: Brittle(4_000_000)))
    await started.process.start(started.answer, started.died)
    yield started
    await started.process.close()


async def test_prompts_are_answered_with_their_tokens(started: Started) -> None:
    for i in range(200):
        started.process.render(f"p{i}", PromptSpec(text=f"prompt {i}", want_text=i == 7))
    await started.until(200)
    assert started.answers["p7"] == Rendered(bytewise(b"prompt 7"), "prompt 7")
    assert started.answers["p199"] == Rendered(bytewise(b"prompt 199"), None)


async def test_a_refused_prompt_is_answered_with_its_error_and_others_go_on(started: Started) -> None:
    started.process.render("bad", PromptSpec(text=""))
    started.process.render("worse", PromptSpec(text="break"))
    started.process.render("good", PromptSpec(text="x"))
    await started.until(3)
    assert started.answers["bad"] == Refusal("empty_prompt", "the prompt has no tokens", "prompt")
    worse = started.answers["worse"]
    assert isinstance(worse, Refusal)
    assert "broken template" in worse.message
    assert started.answers["good"] == Rendered(bytewise(b"x"), None)


async def test_large_prompts_do_not_block_either_side(started: Started) -> None:
    text = "x" * 1_000_000
    for i in range(6):
        started.process.render(f"p{i}", PromptSpec(text=text))
    await started.until(6)
    assert all(isinstance(a, Rendered) and len(a.token_ids) == 1_000_000 for a in started.answers.values())


@pytest.mark.parametrize(("each_ns", "answered"), [(0, 200), (ANSWER_AFTER_NS // 10, 10), (ANSWER_AFTER_NS * 10, 1)])
def test_what_is_ready_does_not_wait_long_for_its_neighbours(
    each_ns: int, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_ns = [0]

    class Slow(ByteRenderer):
        def render(self, spec: PromptSpec) -> Rendered:
            passed_ns[0] += each_ns
            return super().render(spec)

    monkeypatch.setattr("services.worker.tokenizer.time.monotonic_ns", lambda: passed_ns[0])
    todo = deque((f"p{number}", PromptSpec(text="x")) for number in range(200))
    answers = some_answers(Slow(100), todo)
    assert [name for name, _ in answers] == [f"p{number}" for number in range(answered)]
    assert len(todo) == 200 - answered


async def test_its_death_is_reported_once(started: Started) -> None:
    os.kill(started.process.pid, signal.SIGKILL)
    await started.until(deaths=1)
    started.process.render("late", PromptSpec(text="x"))
    assert started.deaths == ["the tokenizer process is gone"]


async def test_closing_is_no_death() -> None:
    started = Started(TokenizerProcess.fork(lambda: ByteRenderer(100)))
    await started.process.start(started.answer, started.died)
    await started.process.close()
    assert started.deaths == []


async def test_an_answer_nobody_can_take_is_a_death_with_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    def break_on(name: str, answer: Answer) -> None:
        raise TypeError("tuple object expected")

    started = Started(TokenizerProcess.fork(lambda: ByteRenderer(100)))
    await started.process.start(break_on, started.died)
    started.process.render("p", PromptSpec(text="x"))
    await started.until(deaths=1)
    assert started.deaths == ["the tokenizer's answers cannot be taken"]
    assert "tuple object expected" in caplog.text
    await started.process.close()


async def test_a_prompt_that_cannot_be_sent_is_a_death_with_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    started = Started(TokenizerProcess.fork(lambda: ByteRenderer(100)))
    await started.process.start(started.answer, started.died)
    unsendable: Any = lambda: None  # noqa: E731
    started.process.render("p", PromptSpec(token_ids=(unsendable,)))
    await started.until(deaths=1)
    assert started.deaths == ["prompts cannot be sent to the tokenizer process"]
    assert "pickle" in caplog.text
    await started.process.close()


async def test_the_process_leaves_what_it_inherits_to_its_parent_s_collector() -> None:
    started = Started(TokenizerProcess.fork(lambda: Frozen(100)))
    await started.process.start(started.answer, started.died)
    started.process.render("p", PromptSpec(text="how many?"))
    await started.until(1)
    await started.process.close()
    answer = started.answers["p"]
    assert isinstance(answer, Rendered)
    assert answer.token_ids[0] > gc.get_freeze_count()
