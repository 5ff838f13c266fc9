"""The tokenizer's process: order, errors, batches, large prompts, what is forgotten."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.worker.core.prompt_line import AHEAD_CHARACTERS
from services.worker.engine import PromptSpec, Rendered
from services.worker.simulated.engine import ByteRenderer
from services.worker.tokenizer import ANSWER_AFTER_NS, LONG_CHARACTERS, Answer, Refusal, TokenizerPool, some_answers
from tests.support.answered import Answered
from tests.support.gate import Gate, Gated
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

    def __init__(self, pool: TokenizerPool) -> None:
        super().__init__()
        self.pool = pool


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    started = Started(TokenizerPool.fork(lambda: Brittle(4_000_000)))
    await started.pool.start(started.answer, started.died)
    yield started
    await started.pool.close()


async def test_prompts_are_answered_with_their_tokens(started: Started) -> None:
    for i in range(200):
        started.pool.render(f"p{i}", PromptSpec(text=f"prompt {i}", want_text=i == 7))
    await started.until(200)
    assert started.answers["p7"] == Rendered(bytewise(b"prompt 7"), "prompt 7")
    assert started.answers["p199"] == Rendered(bytewise(b"prompt 199"), None)


async def test_a_refused_prompt_is_answered_with_its_error_and_others_go_on(started: Started) -> None:
    started.pool.render("bad", PromptSpec(text=""))
    started.pool.render("worse", PromptSpec(text="break"))
    started.pool.render("good", PromptSpec(text="x"))
    await started.until(3)
    assert started.answers["bad"] == Refusal("empty_prompt", "the prompt has no tokens", "prompt")
    worse = started.answers["worse"]
    assert isinstance(worse, Refusal)
    assert "broken template" in worse.message
    assert started.answers["good"] == Rendered(bytewise(b"x"), None)


async def test_large_prompts_do_not_block_either_side(started: Started) -> None:
    text = "x" * 1_000_000
    for i in range(6):
        started.pool.render(f"p{i}", PromptSpec(text=text))
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
    begun = [0]
    answers = some_answers(Slow(100), todo, begun)
    assert [name for name, _ in answers] == [f"p{number}" for number in range(answered)]
    assert begun == [answered]
    assert len(todo) == 200 - answered


def test_answers_do_not_wait_for_a_long_prompt_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.tokenizer.time.monotonic_ns", lambda: 0)
    texts = {"a": "x", "b": "x" * LONG_CHARACTERS, "long": "x" * (LONG_CHARACTERS + 1), "c": "x"}
    todo = deque((name, PromptSpec(text=text)) for name, text in texts.items())
    sent = [[name for name, _ in some_answers(Brittle(2 * LONG_CHARACTERS), todo, [0])] for _ in range(2)]
    assert sent == [["a", "b"], ["long", "c"]]


async def test_closing_is_no_death() -> None:
    started = Started(TokenizerPool.fork(lambda: ByteRenderer(100)))
    await started.pool.start(started.answer, started.died)
    await started.pool.close()
    assert started.deaths == []


async def test_an_answer_nobody_can_take_is_a_death_with_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    def break_on(name: str, answer: Answer) -> None:
        raise TypeError("tuple object expected")

    started = Started(TokenizerPool.fork(lambda: ByteRenderer(100)))
    await started.pool.start(break_on, started.died)
    started.pool.render("p", PromptSpec(text="x"))
    await started.until(deaths=1)
    assert started.deaths == ["the tokenizer's answers cannot be taken"]
    assert "tuple object expected" in caplog.text
    await started.pool.close()


async def test_a_prompt_that_cannot_be_sent_is_a_death_with_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    started = Started(TokenizerPool.fork(lambda: ByteRenderer(100)))
    await started.pool.start(started.answer, started.died)
    unsendable: Any = lambda: None  # noqa: E731
    started.pool.render("p", PromptSpec(token_ids=(unsendable,)))
    await started.until(deaths=1)
    assert started.deaths == ["prompts cannot be sent to the tokenizer process"]
    assert "pickle" in caplog.text
    await started.pool.close()


async def test_what_is_forgotten_before_it_goes_over_is_not_rendered() -> None:
    gate = Gate()
    pool = TokenizerPool.fork(lambda: Gated(gate))
    started = Started(pool)
    await pool.start(started.answer, started.died)
    pool.render("first", PromptSpec(text="wait"))
    for number in range(1000):
        pool.render(f"p{number}", PromptSpec(text="x" * 1000))
    pool.render("last", PromptSpec(text="how many?"))
    await gate.reached()
    for number in range(1000):
        pool.forget(f"p{number}")
    gate.open()
    await started.until(2)
    last = started.answers["last"]
    assert isinstance(last, Rendered)
    assert last.token_ids[0] <= 2 + AHEAD_CHARACTERS // 1000 + 1, "all but those that had gone ahead were left out"
    assert list(started.answers) == ["first", "last"], "and those are not answered either"
    assert not len(pool._processes[0]._prompts)
    await pool.close()


async def test_the_process_leaves_what_it_inherits_to_its_parent_s_collector() -> None:
    started = Started(TokenizerPool.fork(lambda: Frozen(100)))
    await started.pool.start(started.answer, started.died)
    started.pool.render("p", PromptSpec(text="how many?"))
    await started.until(1)
    await started.pool.close()
    answer = started.answers["p"]
    assert isinstance(answer, Rendered)
    assert answer.token_ids[0] > gc.get_freeze_count()
