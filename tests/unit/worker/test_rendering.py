"""Which prompts are rendered on the event loop's thread, and that it makes no difference to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.worker.engine import PromptSpec, Rendered
from services.worker.rendering import SHORT_CHARACTERS, SLOW_NS, SLOW_PAUSE_NS, Rendering
from services.worker.simulated.engine import ByteRenderer
from services.worker.tokenizer import OnAnswer, OnDeath, Refusal, TokenizerPool, failed
from tests.support.answered import Answered
from tests.support.gate import Gate, Gated
from tests.support.rendered import bytewise


class PanicError(BaseException):
    """What Python gets of a panic in Rust."""


class Own(ByteRenderer):
    """Notes what is rendered here, and takes `takes_ns` for it; breaks, as a template might, on one word."""

    def __init__(self) -> None:
        super().__init__(1_000_000)
        self.rendered: list[str | None] = []
        self.takes_ns = 0
        self.now_ns = 0

    def render(self, spec: PromptSpec) -> Rendered:
        self.rendered.append(spec.text)
        self.now_ns += self.takes_ns
        if spec.text == "panic":
            raise PanicError("retry-limit-in-match over")
        if spec.text == "break":
            raise ZeroDivisionError("broken template")
        return super().render(spec)


class Interrupted(ByteRenderer):
    """Is rendering when the worker is interrupted."""

    def render(self, spec: PromptSpec) -> Rendered:
        raise KeyboardInterrupt


class Started(Answered):
    """A rendering with its answers."""

    def __init__(self, rendering: Rendering, own: Own) -> None:
        super().__init__()
        self.rendering = rendering
        self.own = own


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    own = Own()
    pool = TokenizerPool.fork(lambda: ByteRenderer(1_000_000))
    started = Started(Rendering(pool, own, lambda: own.now_ns), own)
    await started.rendering.start(started.answer, started.died)
    yield started
    await started.rendering.close()


async def test_a_short_prompt_alone_is_rendered_here_but_not_before_its_caller_has_gone_on(started: Started) -> None:
    started.rendering.render("p", PromptSpec(text="alone", want_text=True))
    assert not started.answers
    await started.until(1)
    assert started.answers["p"] == Rendered(bytewise(b"alone"), "alone")
    assert started.own.rendered == ["alone"]


async def test_what_a_process_died_of_is_not_tried_again_here() -> None:
    class Dying(TokenizerPool):
        """Answers as one whose process died of the prompt."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        async def start(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
            self.answer = on_answer

        def render(self, name: str, spec: PromptSpec) -> None:
            self.asked.append(name)

    own, pool, answered = Own(), Dying(), Answered()
    rendering = Rendering(pool, own, lambda: own.now_ns)
    await rendering.start(answered.answer, answered.died)
    rendering.render("p", PromptSpec(text="well"))
    rendering.render("q.1", PromptSpec(text="deadly"))
    await asyncio.sleep(0)
    pool.answer("q.1", failed("signal 11"))
    rendering.render("q.2", PromptSpec(text="deadly"))
    await asyncio.sleep(0)
    assert (pool.asked, own.rendered, list(answered.answers)) == (["q.1", "q.2"], ["well"], ["p", "q.1"])


async def test_of_several_at_once_the_first_alone_is_rendered_here(started: Started) -> None:
    for i in range(5):
        started.rendering.render(f"p{i}", PromptSpec(text=f"prompt {i}"))
    await started.until(5)
    assert started.answers == {f"p{i}": Rendered(bytewise(f"prompt {i}".encode())) for i in range(5)}
    assert started.own.rendered == ["prompt 0"]


async def gated() -> tuple[Started, Gate]:
    """Return a rendering whose process waits at the gate with what is long."""
    gate, own = Gate(), Own()
    pool = TokenizerPool.fork(lambda: Gated(gate, lambda spec: spec.characters > SHORT_CHARACTERS))
    started = Started(Rendering(pool, own, lambda: own.now_ns), own)
    await started.rendering.start(started.answer, started.died)
    return started, gate


async def test_a_short_prompt_does_not_wait_for_the_long_ones_of_others() -> None:
    started, gate = await gated()
    started.rendering.render("long", PromptSpec(text="x" * 500_000))
    await gate.reached()
    for number in range(3):
        started.rendering.render(f"short{number}", PromptSpec(text=f"{number}"))
        await started.until(number + 1)
    assert started.own.rendered == ["0", "1", "2"]
    gate.open()
    await started.until(4)
    await started.rendering.close()


async def test_while_the_processes_have_a_short_one_nothing_is_rendered_here() -> None:
    started, gate = await gated()
    started.rendering.render("long", PromptSpec(text="x" * 500_000))
    await gate.reached()
    for name in "abc":
        started.rendering.render(name, PromptSpec(text=name))
    await started.until(1)
    started.rendering.render("d", PromptSpec(text="d"))
    gate.open()
    await started.until(5)
    assert started.own.rendered == ["a"]
    started.rendering.render("e", PromptSpec(text="e"))
    await started.until(6)
    assert started.own.rendered == ["a", "e"]
    await started.rendering.close()


@pytest.mark.parametrize(
    "spec",
    [
        PromptSpec(text="x" * (SHORT_CHARACTERS + 1)),
        PromptSpec(token_ids=(120,) * (SHORT_CHARACTERS + 1)),
        PromptSpec(messages_json='[{"role": "user", "content": "' + "x" * SHORT_CHARACTERS + '"}]'),
        PromptSpec(text="x", chat_template_kwargs_json='{"a": "' + "x" * SHORT_CHARACTERS + '"}'),
        PromptSpec(text="x", tool_choice_json='"' + "x" * SHORT_CHARACTERS + '"'),
        PromptSpec(text="x", chat_template="x" * SHORT_CHARACTERS),
    ],
)
async def test_what_is_long_in_any_of_its_parts_is_not_rendered_here(started: Started, spec: PromptSpec) -> None:
    started.rendering.render("p", spec)
    await started.until(1)
    assert started.own.rendered == []


async def test_offered_functions_count_too(started: Started) -> None:
    tools = '[{"type": "function", "function": {"name": "' + "x" * SHORT_CHARACTERS + '"}}]'
    started.rendering.render("p", PromptSpec(messages_json="[]", tools_json=tools, tool_choice_json='"none"'))
    await started.until(1)
    assert started.own.rendered == []


async def test_as_long_as_a_short_one_may_be(started: Started) -> None:
    started.rendering.render("p", PromptSpec(text="x" * SHORT_CHARACTERS))
    await started.until(1)
    assert started.own.rendered == ["x" * SHORT_CHARACTERS]


async def test_after_a_slow_one_the_processes_render_everything_for_a_while(started: Started) -> None:
    started.own.takes_ns = SLOW_NS + 1
    started.rendering.render("slow", PromptSpec(text="slow"))
    await started.until(1)
    started.own.now_ns += SLOW_PAUSE_NS - 1
    started.rendering.render("soon", PromptSpec(text="soon"))
    await started.until(2)
    assert started.own.rendered == ["slow"]
    started.own.now_ns += 1
    started.rendering.render("later", PromptSpec(text="later"))
    await started.until(3)
    assert started.own.rendered == ["slow", "later"]


async def test_one_that_takes_just_as_long_as_it_may_is_not_slow(started: Started) -> None:
    started.own.takes_ns = SLOW_NS
    for i in range(3):
        started.rendering.render(f"p{i}", PromptSpec(text=f"{i}"))
        await started.until(i + 1)
    assert started.own.rendered == ["0", "1", "2"]


async def test_a_refused_and_a_broken_prompt_are_answered_and_others_go_on(started: Started) -> None:
    started.rendering.render("bad", PromptSpec(text=""))
    await started.until(1)
    started.rendering.render("worse", PromptSpec(text="break"))
    await started.until(2)
    started.rendering.render("good", PromptSpec(text="x"))
    await started.until(3)
    assert started.answers["bad"] == Refusal("empty_prompt", "the prompt has no tokens", "prompt")
    worse = started.answers["worse"]
    assert isinstance(worse, Refusal)
    assert "broken template" in worse.message
    assert started.answers["good"] == Rendered(bytewise(b"x"), None)
    assert started.own.rendered == ["", "break", "x"]


async def test_an_answer_nobody_can_take_is_a_death_with_a_stack_trace(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    started.takes_answers = False
    started.rendering.render("p", PromptSpec(text="x"))
    await started.until(deaths=1)
    assert started.deaths == ["the tokenizer's answers cannot be taken"]
    assert "tuple object expected" in caplog.text


async def test_a_panic_of_the_tokenizer_fails_its_prompt_and_the_processes_render_for_a_while(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    """What it may have broken is not what the next one is rendered with."""
    started.rendering.render("p", PromptSpec(text="panic"))
    await started.until(1)
    assert started.answers["p"] == Refusal(
        "tokenizer_error",
        "the tokenizer failed at the prompt: PanicError: retry-limit-in-match over",
        "prompt",
        rejects=False,
    )
    assert "p: rendering it failed" in caplog.text
    assert started.deaths == []
    started.own.now_ns += SLOW_PAUSE_NS - 1
    started.rendering.render("soon", PromptSpec(text="soon"))
    await started.until(2)
    started.own.now_ns += 1
    started.rendering.render("later", PromptSpec(text="later"))
    await started.until(3)
    assert started.own.rendered == ["panic", "later"]


async def test_what_ends_the_worker_ends_it(started: Started) -> None:
    with pytest.raises(KeyboardInterrupt):
        started.rendering._render(Interrupted(100), "p", PromptSpec(text="x"))


async def test_what_is_forgotten_is_not_rendered(started: Started) -> None:
    started.rendering.render("first", PromptSpec(text="x" * 1_000_000))
    started.rendering.render("lone", PromptSpec(text="y"))
    for i in range(5):
        started.rendering.render(f"p{i}", PromptSpec(text="y"))
        started.rendering.forget(f"p{i}")
    await started.until(2)
    started.rendering.render("after", PromptSpec(text="z"))
    await started.until(3)
    assert started.answers.keys() == {"first", "lone", "after"}
    assert started.own.rendered == ["y", "z"], "none of them is company"


async def test_nothing_is_rendered_after_the_end(started: Started) -> None:
    started.rendering.render("p", PromptSpec(text="x"))
    await started.rendering.close()
    assert started.own.rendered == []
    assert not started.answers


async def test_without_a_renderer_of_its_own_the_processes_render_everything() -> None:
    own = Own()
    rendering = Rendering(TokenizerPool.fork(lambda: ByteRenderer(100)), None)
    started = Started(rendering, own)
    await rendering.start(started.answer, started.died)
    rendering.render("p", PromptSpec(text="x"))
    await started.until(1)
    assert started.answers["p"] == Rendered(bytewise(b"x"), None)
    await rendering.close()
