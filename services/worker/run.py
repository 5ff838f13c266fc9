"""One attempt as the shell keeps it: the request, what it generated, and the completion made of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from penstock.request.v1 import request_pb2 as pb
from services.logs import about
from services.rpc.encoding import length_tag, number_tag, wrapped
from services.rpc.limits import MAX_REQUEST_BYTES
from services.worker import wire
from services.worker.core.messages import Credits, Ending, EndingKind, Lease
from services.worker.outputs import RunOutput

log = logging.getLogger("worker.run")

_OUTCOME: Final = number_tag(pb.Result, "outcome")
_MODEL: Final = length_tag(pb.Result, "model")
_ERROR: Final = length_tag(pb.Result, "error")
_PREEMPTIONS: Final = number_tag(pb.Result, "preemptions")

_USAGE: Final = length_tag(pb.Result, "usage")
_PROMPT_TOKENS: Final = number_tag(pb.Usage, "prompt_tokens")
_COMPLETION_TOKENS: Final = number_tag(pb.Usage, "completion_tokens")
_CACHED_TOKENS: Final = number_tag(pb.Usage, "cached_tokens")

_TIMINGS: Final = length_tag(pb.Result, "timings")
_DELIVERED: Final = number_tag(pb.Timings, "delivered_unix_ns")
_ENGINE_STARTED: Final = number_tag(pb.Timings, "engine_started_unix_ns")
_FIRST_TOKEN: Final = number_tag(pb.Timings, "first_token_unix_ns")
_LAST_TOKEN: Final = number_tag(pb.Timings, "last_token_unix_ns")

_CREDITS: Final = length_tag(pb.Result, "credits")
_GRANTED: Final = number_tag(pb.Credits, "granted_unix_ns")
_BOOKED: Final = number_tag(pb.Credits, "booked_blocks")
_SETTLED: Final = number_tag(pb.Credits, "settled_blocks")
_RELEASED: Final = number_tag(pb.Credits, "released_blocks")
_TOKENIZER_ACKS: Final = number_tag(pb.Credits, "tokenizer_acks")


class Run:
    """A delivered request. Times are Unix nanoseconds, 0 until they are known."""

    __slots__ = (
        "booked_blocks", "completed_ns", "delivered_ns", "ending", "engine_started_ns", "first_token_ns", "generation",
        "last_token_ns", "lease", "output", "prompt_ids", "prompt_text", "request", "run_id", "settled_blocks",
        "submitted_ns", "tell_at_tokens", "tokenized_ns", "watched",
    )  # fmt: skip

    def __init__(self, lease: Lease, run_id: str, request: pb.Request, submitted_ns: int, delivered_ns: int) -> None:
        """Begin with nothing generated."""
        self.lease = lease
        self.run_id = run_id
        self.request = request
        self.submitted_ns = submitted_ns
        self.delivered_ns = delivered_ns
        self.output = RunOutput()
        self.prompt_ids: list[int] = []
        self.prompt_text: str | None = None
        self.watched = False
        self.tell_at_tokens = 0
        """Output length at which the session wants to hear of the run; 0 means never."""
        self.tokenized_ns = 0
        self.engine_started_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.booked_blocks = 0
        self.settled_blocks = 0
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

        A parser that reads calls in parts is fed as vLLM's server feeds it, a step at a time, whoever watches.
        """
        return 1 if self.watched or self.request.chat.tools.in_parts else self.tell_at_tokens

    def finish(self, ending: Ending, model: str, spent: Credits) -> bytes:
        """Return the encoded Complete of this run; once, for what it is made of is not kept beside it.

        Raises ValueError if what the run said cannot be written; a failed ending, which tells none of it, still can.
        """
        self.ending = ending
        complete = self._complete(ending, model, spent)
        if len(complete) > MAX_REQUEST_BYTES:
            log.warning("%s: the result is too large: %d bytes", self.run_id, len(complete), extra=self.about)
            self.ending = _too_large(len(complete))
            complete = self._complete(self.ending, model, spent)
        self.request.ClearField("prompt")
        self.prompt_ids = []
        self.prompt_text = None
        self.output = RunOutput()
        return complete

    def _complete(self, ending: Ending, model: str, spent: Credits) -> bytes:
        """Return what only this worker knows; under which names it was asked for is what the queue knows."""
        if ending.kind is EndingKind.FAILED:
            return wire.failed(self.lease, ending)
        parts = [wrapped(_MODEL, model.encode()), self._usage(), self._timings(), _credits(spent)]
        wire.put_number(parts, _OUTCOME, wire.OUTCOMES[ending.kind])
        wire.put_number(parts, _PREEMPTIONS, self.output.preemptions)
        if ending.kind is EndingKind.COMPLETED:
            said = pb.Result()
            self.output.fill(said, self.prompt_text)
            parts.append(said.SerializeToString())
        else:
            parts.append(wrapped(_ERROR, wire.error_of(ending).SerializeToString()))
        return wire.completed(self.lease, b"".join(parts))

    def _usage(self) -> bytes:
        parts: list[bytes] = []
        wire.put_number(parts, _PROMPT_TOKENS, len(self.prompt_ids))
        wire.put_number(parts, _COMPLETION_TOKENS, self.output.tokens)
        wire.put_number(parts, _CACHED_TOKENS, self.output.cached_tokens)
        return wrapped(_USAGE, b"".join(parts))

    def _timings(self) -> bytes:
        parts: list[bytes] = []
        wire.put_number(parts, _DELIVERED, self.delivered_ns)
        wire.put_number(parts, _ENGINE_STARTED, self.engine_started_ns)
        wire.put_number(parts, _FIRST_TOKEN, self.first_token_ns)
        wire.put_number(parts, _LAST_TOKEN, self.last_token_ns)
        return wrapped(_TIMINGS, b"".join(parts))

    def token_messages(self) -> list[bytes]:
        """Return the deltas a watcher has not been sent, encoded."""
        messages = []
        for delta in self.output.deltas(self.lease.request_id, self.lease.attempt):
            message = wire.tokens(delta)
            if len(message) > MAX_REQUEST_BYTES:
                # The whole result will say the same with its own limit; the text still arrives in time.
                log.warning(
                    "%s: a delta's log probabilities are too large and were left out", self.run_id, extra=self.about
                )
                delta.ClearField("logprobs")
                message = wire.tokens(delta)
            messages.append(message)
        return messages


def _credits(spent: Credits) -> bytes:
    parts: list[bytes] = []
    wire.put_number(parts, _GRANTED, spent.granted_ns)
    wire.put_number(parts, _BOOKED, spent.booked_blocks)
    wire.put_number(parts, _SETTLED, spent.settled_blocks)
    wire.put_number(parts, _RELEASED, spent.released_blocks)
    wire.put_number(parts, _TOKENIZER_ACKS, spent.tokenizer_acks)
    return wrapped(_CREDITS, b"".join(parts))


def _too_large(size_bytes: int) -> Ending:
    return Ending(
        EndingKind.REJECTED,
        "result_too_large",
        f"the result takes {size_bytes} bytes, at most {MAX_REQUEST_BYTES} can be stored; ask for fewer logprobs",
        "sampling.logprobs",
    )
