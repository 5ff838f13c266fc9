"""One attempt as the shell keeps it: the request, what it generated, and the completion made of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.limits import MAX_REQUEST_BYTES
from penstock.request.v1 import request_pb2 as pb
from services.logs import about
from services.worker import wire
from services.worker.core.messages import Credits, Ending, EndingKind, EngineFailed, EngineFinished, Lease
from services.worker.engine import EngineRequest, read_as_message
from services.worker.outputs import RunOutput

UNWRITABLE = Ending(EndingKind.FAILED, "internal_error", "the result cannot be written; the worker's log says why")
UNREADABLE = Ending(EndingKind.FAILED, "internal_error", "the result was lost; the worker's log says why")

log = logging.getLogger("worker.run")


class Run:
    """A delivered request. Times are Unix nanoseconds, 0 until they are known."""

    __slots__ = (
        "_in_parts", "_outgrown", "_read_as_message", "completed_ns", "delivered_ns", "ending",
        "engine_started_ns", "first_token_ns", "generation", "last_token_ns", "lease", "output",
        "prompt_ids", "prompt_text", "request", "run_id", "sampling", "submitted_ns",
        "tell_at_tokens", "tokenized_ns", "watched",
    )  # fmt: skip

    def __init__(
        self,
        lease: Lease,
        run_id: str,
        request: pb.Request,
        submitted_ns: int,
        delivered_ns: int,
        tells_reasoning: bool = False,
    ) -> None:
        """Begin with nothing generated. `tells_reasoning` is what the engine's shape says."""
        self.lease = lease
        self.run_id = run_id
        self.request = request
        self.sampling = request.sampling
        """Kept: what is inside a message is wrapped anew whenever it is asked for while nobody has it."""
        self._read_as_message = read_as_message(request, tells_reasoning)
        """The chat whose answer is read as a message, if it is."""
        self._in_parts = _in_parts(self._read_as_message)
        self._outgrown = False
        """Whether it was found to be so, and is being ended."""
        self.submitted_ns = submitted_ns
        self.delivered_ns = delivered_ns
        self.output = RunOutput(self._read_as_message is not None)
        self.prompt_ids: Sequence[int] = ()
        self.prompt_text: str | None = None
        self.watched = False
        """Whether the session wants to hear of each step, as it last said."""
        self.tell_at_tokens = 0
        """Output length at which the session wants to hear of the run, as it last said; 0 means never."""
        self.tokenized_ns = 0
        self.engine_started_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.completed_ns = 0
        self.generation: asyncio.Task[None] | None = None
        self.ending: Ending | None = None

    @property
    def about(self) -> dict[str, str]:
        """What a log record about it carries."""
        return about(self.lease.request_id, self.request.traceparent)

    @property
    def wanted_at_tokens(self) -> int:
        """Output length at which the engine is to hand over next: a watched run every step, 0 at its end.

        A parser that reads a message in parts is fed as vLLM's server feeds it, a step at a time, whoever watches.
        """
        return 1 if self.watched or self._in_parts else self.tell_at_tokens

    def for_engine(self, max_tokens: int, guaranteed: bool) -> EngineRequest:
        """Return what the engine is asked for: at most `max_tokens` for each completion, first if `guaranteed`."""
        return EngineRequest(
            self.run_id,
            self.prompt_ids,
            max_tokens,
            self.sampling,
            self.request.echo,
            self.wanted_at_tokens,
            self._read_as_message,
            guaranteed,
            self.request.model,
        )

    def engine_ended(self) -> EngineFinished | EngineFailed:
        """Return what the session hears at the last output of the engine."""
        run_id, output = self.run_id, self.output
        if output.given_up():
            text = f"the engine gave up on the request (finish reasons: {', '.join(output.finish_reasons)})"
            return EngineFailed(run_id, False, "engine_error", text, output_tokens=output.tokens)
        return EngineFinished(run_id, output.tokens, output.preemptions, not output.stopped_by_string())

    def finish(self, ending: Ending, model: str, spent: Credits) -> bytes:
        """Return the encoded Complete of this run; once, for what it is made of is not kept beside it.

        Raises ValueError if what the run said cannot be written; a failed ending, which tells none of it, still can.
        """
        self.ending = ending
        complete = self._complete(ending, model, spent)
        if len(complete) > MAX_REQUEST_BYTES:
            log.warning("%s: the result is too large: %d bytes", self.run_id, len(complete), extra=self.about)
            self.ending = _too_large(f"{len(complete)}", self._largest())
            complete = self._complete(self.ending, model, spent)
        self.request.ClearField("prompt")
        self._read_as_message = None
        self.prompt_ids = ()
        self.prompt_text = None
        self.output = RunOutput()
        return complete

    def outgrown(self) -> Ending | None:
        """Return, once, how this run is to end if its result cannot be stored any more, however it goes on."""
        least_bytes = self.output.least_bytes
        if least_bytes <= MAX_REQUEST_BYTES or self._outgrown:
            return None
        self._outgrown = True
        tokens = self.output.tokens
        text = "%s: the result is too large: %d bytes with %d tokens; the run is ended"
        log.warning(text, self.run_id, least_bytes, tokens, extra=self.about)
        return _too_large(f"more than {least_bytes}", self._largest())

    def _complete(self, ending: Ending, model: str, spent: Credits) -> bytes:
        """Return what only this worker knows; under which names it was asked for is what the queue knows."""
        if ending.kind is EndingKind.FAILED:
            return wire.failed(self.lease, ending)
        output, result = self.output, pb.Result()
        more: list[bytes] = []
        result.outcome = wire.OUTCOMES[ending.kind]
        result.model = model
        result.preemptions = output.preemptions
        usage, timings, on_credit = result.usage, result.timings, result.credits
        usage.prompt_tokens = len(self.prompt_ids)
        usage.completion_tokens = output.tokens
        usage.cached_tokens = output.cached_tokens
        reasoning_tokens = output.reasoning_tokens
        if reasoning_tokens is not None:
            usage.reasoning_tokens = reasoning_tokens
        timings.delivered_unix_ns = self.delivered_ns
        timings.engine_started_unix_ns = self.engine_started_ns
        timings.first_token_unix_ns = self.first_token_ns
        timings.last_token_unix_ns = self.last_token_ns
        on_credit.granted_unix_ns = spent.granted_ns
        on_credit.booked_blocks = spent.booked_blocks
        on_credit.settled_blocks = spent.settled_blocks
        on_credit.released_blocks = spent.released_blocks
        on_credit.tokenizer_acks = spent.tokenizer_acks
        if ending.kind is EndingKind.COMPLETED:
            more = output.fill(result, self.prompt_text)
        else:
            result.error.CopyFrom(wire.error_of(ending))
        return wire.completed(self.lease, result, more)

    def _largest(self) -> str:
        """Return the field that most of a result is there for."""
        if self.output.has_more_of_the_prompt():
            return "sampling.prompt_logprobs" if self.sampling.HasField("prompt_logprobs") else "echo"
        return "sampling.logprobs" if self.sampling.HasField("logprobs") else "sampling.max_tokens"

    def token_messages(self) -> list[bytes]:
        """Return the deltas a watcher has not been sent, encoded."""
        messages = []
        for delta, logprobs in self.output.deltas(self.lease.request_id, self.lease.attempt):
            message = wire.tokens(delta, logprobs)
            if len(message) > MAX_REQUEST_BYTES:
                # The whole result will say the same with its own limit; the text still arrives in time.
                log.warning(
                    "%s: a delta's log probabilities are too large and were left out", self.run_id, extra=self.about
                )
                message = wire.tokens(delta)
            messages.append(message)
        return messages


def _in_parts(chat: pb.ChatPrompt | None) -> bool:
    return chat is not None and (chat.tools.in_parts or chat.as_message.in_parts)


def _too_large(size_bytes: str, field: str) -> Ending:
    fewer = "tokens" if field == "sampling.max_tokens" else "logprobs"
    return Ending(
        EndingKind.REJECTED,
        "result_too_large",
        f"the result takes {size_bytes} bytes, at most {MAX_REQUEST_BYTES} can be stored; ask for fewer {fewer}",
        field,
    )
