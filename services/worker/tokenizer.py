"""Rendering and tokenization in a process of its own, off the event loop.

The processes are forked by a nursery, the first before the engine and before any gRPC; one that dies has a successor.
Prompts wait here, in the worker, and go over as the process takes them; it answers what it has every few milliseconds.
The form that an output is to have is looked at there as well: the parsers of grammars that do are not ours, and what
none of our bounds names may end them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import select
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from services.worker.core.prompt_line import PromptLine
from services.worker.engine import CheckingRenderer, PromptSpec, Rendered, Renderer, RequestRefusedError
from services.worker.nursery import Child, Nursery, NurseryGoneError
from services.worker.processes import have_less_stack

ANSWER_AFTER_NS = 4_000_000
"""How long prompts are rendered before the answers there are by then are sent: what is ready waits no longer for its
neighbours, a part of an engine's step. A number of prompts would be too many where each takes a millisecond, and too
few where each takes some microseconds: every batch of answers goes round worker, scheduler and queue by itself."""

LONG_CHARACTERS = 16 * 1024
"""As many as a fast tokenizer takes in that time. A prompt that has more is not begun before the answers that there are
by then are sent: it may take a second."""

STALLED_AFTER_S = 60.0
"""A process that has answered nothing for so long, though it has prompts, will not: a million tokens take a slow
tokenizer 5 s. Loading does not count: it has a bound of its own."""

STALL_LOOKS = 10
"""How often it is looked at in that time, and while it loads: where all processes were stopped for a minute, that is
one look."""

LOAD_S = 300.0
"""Where nobody says how long a process may take to be there, loaded."""

FORM_CPU_S = 15.0
"""Processor time that a look at one form may take: the engine looks at what has passed again, on the worker's own event
loop. A schema of twenty fields takes 1 ms, the longest within the bounds of structured outputs 6 s here (counted
repetitions of a class as `[^<>]`): a slower core is not to refuse what this one takes."""

KILLED = f"signal {signal.SIGKILL:d}"
"""What no form does by itself: it is somebody else's doing, or the kernel's when memory is short. The next
attempts show whose."""

BEGUN, LOOKS = 0, 1
"""The two numbers that a process shares: prompts that it has begun, and whether it looks at a form."""

FRAME = struct.Struct("!Q")
"""Length in bytes of the pickle that follows."""

log = logging.getLogger("worker.tokenizer")


class Refusal(NamedTuple):
    """Why a prompt was not rendered. Unless it `rejects` the request, the attempt failed and another may succeed."""

    code: str
    message: str
    param: str
    rejects: bool = True


Answer: TypeAlias = Rendered | Refusal

PackedAnswer: TypeAlias = tuple[str, tuple[bytes, str | None] | Refusal]
"""A prompt's name and its answer, as they cross to the worker."""

OnAnswer: TypeAlias = Callable[[str, Answer], None]
OnDeath: TypeAlias = Callable[[str], None]


class NotLoadedError(Exception):
    """A process has ended before it could render anything."""


def failed(message: str) -> Refusal:
    """Return the answer to a prompt that cost the tokenizer its life, or might have: it counts as an attempt."""
    return Refusal("tokenizer_error", message, "prompt", rejects=False)


def deadly_form(why: str) -> Refusal:
    """Return the answer to a form that a process died of, or took too long for: each attempt would say so again."""
    text = f"the structured outputs cannot be looked at: {why}"
    return Refusal("invalid_parameter", text, "sampling.structured_outputs")


class TokenizerProcess:
    """A tokenizer process and those that follow it: one at a time, each until it dies or stalls."""

    def __init__(self, nursery: Nursery, load_s: float = LOAD_S) -> None:
        """Have one forked, which begins to load; call it with no event loop running, then `start`.

        It, and each that follows, is to have loaded within `load_s` seconds; 0 waits for ever.
        """
        self._nursery = nursery
        self._load_s = load_s
        self._child = nursery.first()
        self._prompts = PromptLine()
        self._ready = asyncio.Event()
        """Set when there may be something to send."""
        self._loaded = asyncio.Event()
        """Set while there is a process that can render."""
        self._lost = asyncio.Event()
        """Set when there is none any more."""
        self._stalled = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def child(self) -> Child:
        """The process that is there."""
        return self._child

    def start(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
        """Begin to work on the running loop; `on_death` is told that nothing will be rendered any more."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(on_answer, on_death), name="tokenizer"),
            loop.create_task(self._watch_loads(on_death), name="tokenizer-loads"),
        ]

    async def loaded(self) -> None:
        """Return when there is a process that can render; never if none ever can, of which `on_death` is told."""
        await self._loaded.wait()

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt."""
        self._prompts.add(name, spec, spec.characters)
        self._ready.set()

    def forget(self, name: str) -> None:
        """Leave a prompt out; one that is not here, or has been answered, changes nothing."""
        self._prompts.forget(name)

    async def close(self) -> None:
        """Take no more answers; the nursery ends the process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._child.socket.close()

    async def _run(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
        """Work with one process after another."""
        try:
            while True:
                await self._work(on_answer, on_death)
                await self._replace(on_answer)
        except NurseryGoneError as error:
            on_death(f"the tokenizer process is gone, and there can be no other: {error}")
        except NotLoadedError as error:
            on_death(str(error))
        except Exception:
            log.exception("the tokenizer's answers cannot be taken")
            on_death("the tokenizer's answers cannot be taken")

    async def _work(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
        """Send prompts and take answers until the process is gone."""
        reader, writer = await asyncio.open_connection(sock=self._child.socket)
        loop = asyncio.get_running_loop()
        beside = [
            loop.create_task(self._write(writer, on_death), name="tokenizer-write"),
            loop.create_task(self._watch(writer), name="tokenizer-watch"),
        ]
        try:
            await self._read(reader, on_answer)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter, on_death: OnDeath) -> None:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                going = self._prompts.go_ahead() if self._loaded.is_set() else []
                if not going:
                    continue
                body = pickle.dumps([(name, spec.packed()) for name, spec in going], protocol=pickle.HIGHEST_PROTOCOL)
                writer.write(FRAME.pack(len(body)))
                writer.write(body)
                await writer.drain()
        except ConnectionError as error:
            # The reader sees the end of the stream as well, and a successor is asked for.
            log.debug("the tokenizer process does not listen: %s", error)
        except Exception:
            log.exception("prompts cannot be sent to the tokenizer process")
            on_death("prompts cannot be sent to the tokenizer process")

    async def _read(self, reader: asyncio.StreamReader, on_answer: OnAnswer) -> None:
        prompts = self._prompts
        try:
            while True:
                (size,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                answers: list[PackedAnswer] = pickle.loads(await reader.readexactly(size))
                self._loaded.set()
                for name, answer in answers:
                    if prompts.answered(name):
                        on_answer(name, _unpacked(answer))
                if prompts.waits:
                    self._ready.set()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            log.debug("the tokenizer process is gone: %r", error)

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Give the process up when it has answered nothing for too long."""
        looks, answered = 0, 0
        while looks <= STALL_LOOKS:
            await asyncio.sleep(STALLED_AFTER_S / STALL_LOOKS)
            waits = self._prompts.is_ahead and self._prompts.answered_count == answered
            looks = looks + 1 if waits else 0
            answered = self._prompts.answered_count
        self._stalled = True
        writer.transport.abort()

    async def _watch_loads(self, on_death: OnDeath) -> None:
        """Say that nothing will be rendered when a process is not there, loaded, for too long.

        Whoever holds it up, the nursery too, is not waited for.
        """
        while await self._loads():
            await self._lost.wait()
            self._lost.clear()
        on_death(f"a tokenizer process has not loaded within {self._load_s:g} s")

    async def _loads(self) -> bool:
        """Return whether the next process has loaded in time."""
        for _ in range(STALL_LOOKS):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._load_s / STALL_LOOKS or None):
                    await self._loaded.wait()
                    return True
        return False

    async def _replace(self, on_answer: OnAnswer) -> None:
        """Have a successor take over, but for the prompt that the process died of; that one's attempt has failed.

        Raises NurseryGoneError, and NotLoadedError if the process had rendered nothing and was not asked to.
        """
        was_loaded = self._loaded.is_set()
        self._loaded.clear()
        self._lost.set()
        stalled, self._stalled = self._stalled, False
        culprit = self._prompts.process_lost(self._child.counter[BEGUN])
        looked = bool(self._child.counter[LOOKS])
        self._child, how = await self._nursery.successor(self._child)
        if not was_loaded:
            raise NotLoadedError(f"the tokenizer process ended before it had loaded ({how})")
        why = f"nothing was answered for {STALLED_AFTER_S:g} s" if stalled else how
        if culprit is None or not culprit.wanted:
            whose = f", while it rendered {culprit.name} in vain" if culprit is not None else ""
            log.warning("a tokenizer process ended (%s)%s; another takes over", why, whose)
        elif looked and (stalled or how != KILLED):
            text = "%s: a tokenizer process ended (%s) while it looked at the structured outputs; another takes over"
            log.warning(text, culprit.name, why)
            on_answer(culprit.name, deadly_form(why if stalled else _of_form(how)))
        else:  # whoever takes the answer says so, too
            on_answer(culprit.name, failed(f"the process that rendered the prompt ended ({why})"))


class TokenizerPool:
    """A few tokenizer processes, taken in turn, and their nursery."""

    def __init__(self, nursery: Nursery, count: int = 1, load_s: float = LOAD_S) -> None:
        """Have `nursery` fork so many, at least one, each of which loads within `load_s` seconds; 0 waits for ever."""
        self._nursery = nursery
        self._processes = deque(TokenizerProcess(nursery, load_s) for _ in range(count))

    @classmethod
    def fork(
        cls, make_renderer: Callable[[], CheckingRenderer], count: int = 1, load_s: float = LOAD_S
    ) -> TokenizerPool:
        """Fork nursery and processes; `make_renderer` runs in each. Call it with no event loop running."""
        return cls(Nursery.fork(partial(_serve, make_renderer)), count, load_s)

    @property
    def pids(self) -> Sequence[int]:
        """The nursery's process id, and those of the processes that are there."""
        return [self._nursery.pid, *(process.child.pid for process in self._processes)]

    async def start(self, on_answer: OnAnswer, on_death: OnDeath) -> None:
        """Begin to work on the running loop."""
        for process in self._processes:
            process.start(on_answer, on_death)

    async def loaded(self) -> None:
        """Return when each of the processes can render; never if one cannot, of which `on_death` is told."""
        for process in tuple(self._processes):
            await process.loaded()

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt with the next process."""
        self._processes[0].render(name, spec)
        self._processes.rotate(-1)

    def forget(self, name: str) -> None:
        """Leave a prompt out that nobody waits for any more."""
        for process in self._processes:
            process.forget(name)

    async def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            await process.close()
        self._nursery.close()


def _unpacked(answer: tuple[bytes, str | None] | Refusal) -> Answer:
    if isinstance(answer, Refusal):
        return answer
    packed, text = answer
    return Rendered(array("I", packed), text)


def _of_form(how: str) -> str:
    """Return why a form cannot be looked at, by how the process that did ended."""
    if how == f"signal {signal.SIGPROF:d}":
        return f"it took over {FORM_CPU_S:g} s of processor time"
    return f"the process that did ended ({how})"


def _serve(make_renderer: Callable[[], CheckingRenderer], theirs: socket.socket, told: memoryview) -> None:
    """Render, in the process, until the worker closes the socket."""
    have_less_stack()
    renderer = make_renderer()
    stream = cast(BinaryIO, theirs.makefile("rwb"))
    _send(stream, [])  # what loads has nothing to answer
    todo: deque[tuple[str, PromptSpec]] = deque()
    while True:
        if not todo or select.select([theirs], [], [], 0)[0]:
            header = stream.read(FRAME.size)
            if len(header) < FRAME.size:
                return
            asked = pickle.loads(stream.read(FRAME.unpack(header)[0]))
            todo.extend([(name, PromptSpec(*spec)) for name, spec in asked])
        _send(stream, some_answers(renderer, todo, told))


def _send(stream: BinaryIO, answers: list[PackedAnswer]) -> None:
    body = pickle.dumps(answers, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(FRAME.pack(len(body)))
    stream.write(body)
    stream.flush()


def some_answers(renderer: CheckingRenderer, todo: deque[tuple[str, PromptSpec]], told: Any) -> list[PackedAnswer]:
    """Render prompts of `todo` in order, at least one, until ANSWER_AFTER_NS or a long one; those done leave it.

    The first number in `told` counts them as they are begun: who dies of one has not answered those before it either.
    The second says that it is not the prompt that is dealt with, but the form.
    """
    until_ns = time.monotonic_ns() + ANSWER_AFTER_NS
    answers: list[PackedAnswer] = []
    while todo and not (answers and todo[0][1].characters > LONG_CHARACTERS):
        name, spec = todo.popleft()
        told[BEGUN] += 1
        answer = answer_to(renderer, name, spec)
        if spec.form and isinstance(answer, Rendered):
            told[LOOKS] = 1
            answer = looked_at(renderer, name, spec, answer)
            told[LOOKS] = 0
        answers.append((name, _packed(answer)))
        if time.monotonic_ns() >= until_ns:
            break
    return answers


def answer_to(renderer: Renderer, name: str, spec: PromptSpec) -> Answer:
    """Return the rendered prompt, or why it is refused; raises only what is no Exception."""
    try:
        return renderer.render(spec)
    except RequestRefusedError as error:
        return Refusal(error.code, error.message, error.param)
    except Exception as error:
        # A prompt that breaks the renderer must not take the process, and every other prompt, with it.
        log.exception("cannot render %s", name)
        return Refusal("invalid_prompt", f"the prompt cannot be rendered: {error}", "prompt")


def looked_at(renderer: CheckingRenderer, name: str, spec: PromptSpec, rendered: Rendered) -> Answer:
    """Return the answer once the form has been looked at: the prompt, or why the request is refused.

    Whoever takes too long ends the process: nothing else interrupts a library that does not return.
    """
    signal.setitimer(signal.ITIMER_PROF, FORM_CPU_S)
    try:
        renderer.check_form(spec, rendered)
    except RequestRefusedError as error:
        return Refusal(error.code, error.message, error.param)
    except Exception:
        # The engine will meet it as well, and says what becomes of the run.
        log.exception("cannot look at the structured outputs of %s", name)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return rendered


def _packed(answer: Answer) -> tuple[bytes, str | None] | Refusal:
    if isinstance(answer, Refusal):
        return answer
    return answer.token_ids.tobytes(), answer.text
