"""Rendering and tokenization in a process of its own, off the event loop.

The child is forked before the engine and before any gRPC, when the model's
libraries are imported and nothing runs yet. Everything that waits goes over at
once; the child answers what it has every few milliseconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import select
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from services.worker.engine import PromptSpec, Rendered, Renderer, RequestRefusedError
from services.worker.processes import die_with_parent

ANSWER_AFTER_NS = 4_000_000
"""How long prompts are rendered before the answers there are by then are sent: what is ready waits no longer for its
neighbours, a part of an engine's step. A number of prompts would be too many where each takes a millisecond, and too
few where each takes some microseconds: every batch of answers goes round worker, scheduler and queue by itself."""

FRAME = struct.Struct("!Q")
"""Length in bytes of the pickle that follows."""

log = logging.getLogger("worker.tokenizer")


class Refusal(NamedTuple):
    """Why a prompt was refused."""

    code: str
    message: str
    param: str


Answer: TypeAlias = Rendered | Refusal


class TokenizerProcess:
    """One tokenizer process. Fork it with `fork`, then `start` it on the event loop."""

    def __init__(self, pid: int, ours: socket.socket) -> None:
        """Talk to the process `pid` over `ours`."""
        self._pid = pid
        self._socket = ours
        self._waiting: list[tuple[str, PromptSpec]] = []
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @classmethod
    def fork(cls, make_renderer: Callable[[], Renderer]) -> TokenizerProcess:
        """Fork the process; `make_renderer` runs in it. Call it with no event loop running."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _child(theirs, make_renderer)
        theirs.close()
        return cls(pid, ours)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._pid

    async def start(self, on_answer: Callable[[str, Answer], None], on_death: Callable[[str], None]) -> None:
        """Begin to work on the running loop; `on_answer` gets each prompt's name and answer."""
        reader, writer = await asyncio.open_connection(sock=self._socket)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write(writer, on_death), name="tokenizer-write"),
            loop.create_task(self._read(reader, on_answer, on_death), name="tokenizer-read"),
        ]

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt."""
        self._waiting.append((name, spec))
        self._ready.set()

    async def close(self) -> None:
        """End the process."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        end_process(self._pid)

    async def _write(self, writer: asyncio.StreamWriter, on_death: Callable[[str], None]) -> None:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                batch, self._waiting = self._waiting, []
                plain = [(name, spec.packed()) for name, spec in batch]
                body = pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)
                writer.write(FRAME.pack(len(body)))
                writer.write(body)
                await writer.drain()
        except ConnectionError as error:
            # The reader sees the end of the stream as well, and reports the death.
            log.debug("the tokenizer process does not listen: %s", error)
        except Exception:
            log.exception("prompts cannot be sent to the tokenizer process")
            on_death("prompts cannot be sent to the tokenizer process")

    async def _read(
        self,
        reader: asyncio.StreamReader,
        on_answer: Callable[[str, Answer], None],
        on_death: Callable[[str], None],
    ) -> None:
        try:
            while True:
                (size,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                for name, answer in pickle.loads(await reader.readexactly(size)):
                    on_answer(name, _unpacked(answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._closing:
                on_death("the tokenizer process is gone")
        except Exception:
            log.exception("the tokenizer's answers cannot be taken")
            on_death("the tokenizer's answers cannot be taken")


class TokenizerPool:
    """A few tokenizer processes, taken in turn."""

    def __init__(self, processes: list[TokenizerProcess]) -> None:
        """Use `processes`, at least one."""
        self._processes = deque(processes)

    async def start(self, on_answer: Callable[[str, Answer], None], on_death: Callable[[str], None]) -> None:
        """Begin to work on the running loop."""
        for process in self._processes:
            await process.start(on_answer, on_death)

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt with the next process."""
        self._processes[0].render(name, spec)
        self._processes.rotate(-1)

    async def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            await process.close()


def end_process(pid: int) -> None:
    """Kill a child and take its exit status."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        # It has died and its status has been taken already.
        return


def _unpacked(answer: tuple[bytes, str | None] | Refusal) -> Answer:
    if isinstance(answer, Refusal):
        return answer
    packed, text = answer
    return Rendered(array("I", packed), text)


def _child(theirs: socket.socket, make_renderer: Callable[[], Renderer]) -> None:
    """Render until the worker closes the socket. Never returns."""
    status = 0
    # What was inherited is the parent's, and in the state in which its other threads left it: to look at it for garbage
    # would copy its memory, run its finalizers, or fail.
    gc.freeze()
    try:
        die_with_parent()
        # Ctrl-C reaches the whole group; the worker still needs answers while it drains.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _serve(theirs, make_renderer())
    except BaseException:
        logging.getLogger("worker.tokenizer").exception("the tokenizer process failed")
        status = 1
    finally:
        os._exit(status)


def _serve(theirs: socket.socket, renderer: Renderer) -> None:
    stream = theirs.makefile("rwb")
    todo: deque[tuple[str, PromptSpec]] = deque()
    while True:
        if not todo or select.select([theirs], [], [], 0)[0]:
            header = stream.read(FRAME.size)
            if len(header) < FRAME.size:
                return
            asked = pickle.loads(stream.read(FRAME.unpack(header)[0]))
            todo.extend([(name, PromptSpec(*spec)) for name, spec in asked])
        answers = some_answers(renderer, todo)
        body = pickle.dumps(answers, protocol=pickle.HIGHEST_PROTOCOL)
        stream.write(FRAME.pack(len(body)))
        stream.write(body)
        stream.flush()


def some_answers(
    renderer: Renderer, todo: deque[tuple[str, PromptSpec]]
) -> list[tuple[str, tuple[bytes, str | None] | Refusal]]:
    """Render prompts of `todo` in order, at least one, until it has taken ANSWER_AFTER_NS; those done leave it."""
    until_ns = time.monotonic_ns() + ANSWER_AFTER_NS
    answers = []
    while todo:
        name, spec = todo.popleft()
        answers.append((name, _packed(answer_to(renderer, name, spec))))
        if time.monotonic_ns() >= until_ns:
            break
    return answers


def answer_to(renderer: Renderer, name: str, spec: PromptSpec) -> Answer:
    """Return the rendered prompt, or why it is refused; never raises."""
    try:
        return renderer.render(spec)
    except RequestRefusedError as error:
        return Refusal(error.code, error.message, error.param)
    except Exception as error:
        # A prompt that breaks the renderer must not take the process, and every other prompt, with it.
        log.exception("cannot render %s", name)
        return Refusal("invalid_prompt", f"the prompt cannot be rendered: {error}", "prompt")


def _packed(answer: Answer) -> tuple[bytes, str | None] | Refusal:
    if isinstance(answer, Refusal):
        return answer
    return answer.token_ids.tobytes(), answer.text
