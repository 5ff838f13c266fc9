"""One attempt as the shell keeps it: the request, what it generated, and the completion made of it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from penstock.queue.v1 import queue_pb2 as q
from penstock.request.v1 import request_pb2 as pb
from services.logs import about
from services.rpc.limits import MAX_REQUEST_BYTES
from services.worker import wire
from services.worker.core.messages import Credits, Ending, EndingKind, Lease
from services.worker.outputs import RunOutput

log = logging.getLogger("worker.run")


@dataclass(slots=True)
class Run:
    """A delivered request. Times are Unix nanoseconds, 0 until they are known."""

    lease: Lease
    run_id: str
    request: pb.Request
    submitted_ns: int
    delivered_ns: int
    output: RunOutput = field(default_factory=RunOutput)
    prompt_ids: list[int] = field(default_factory=list)
    prompt_text: str | None = None
    watched: bool = False
    tell_at_tokens: int = 0
    """Output length at which the session wants to hear of the run; 0 means never."""
    tokenized_ns: int = 0
    engine_started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    booked_blocks: int = 0
    settled_blocks: int = 0
    completed_ns: int = 0
    generation: asyncio.Task[None] | None = None
    ending: Ending | None = None

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
        """Return the encoded Complete of this run; once, for what it is made of is not kept beside it."""
        self.ending = ending
        complete = wire.complete(self._complete(ending, model, spent))
        if len(complete) > MAX_REQUEST_BYTES:
            log.warning("%s: the result is too large: %d bytes", self.run_id, len(complete), extra=self.about)
            self.ending = _too_large(len(complete))
            complete = wire.complete(self._complete(self.ending, model, spent))
        self.request.ClearField("prompt")
        self.prompt_ids = []
        self.prompt_text = None
        self.output = RunOutput()
        return complete

    def _complete(self, ending: Ending, model: str, spent: Credits) -> q.Complete:
        """Return what only this worker knows; under which names it was asked for is what the queue knows."""
        complete = q.Complete(lease=wire.lease_ref(self.lease))
        if ending.kind is EndingKind.FAILED:
            complete.failure.CopyFrom(_error(ending))
            return complete
        result = complete.result
        result.outcome = wire.OUTCOMES[ending.kind]
        result.model = model
        usage, timings = result.usage, result.timings
        usage.prompt_tokens = len(self.prompt_ids)
        timings.delivered_unix_ns = self.delivered_ns
        timings.engine_started_unix_ns = self.engine_started_ns
        timings.first_token_unix_ns = self.first_token_ns
        timings.last_token_unix_ns = self.last_token_ns
        result.credits.granted_unix_ns = spent.granted_ns
        result.credits.booked_blocks = spent.booked_blocks
        result.credits.settled_blocks = spent.settled_blocks
        result.credits.released_blocks = spent.released_blocks
        result.credits.tokenizer_acks = spent.tokenizer_acks
        if ending.kind is EndingKind.COMPLETED:
            self.output.fill(result, self.prompt_text)
        else:
            result.error.CopyFrom(_error(ending))
            usage.completion_tokens = self.output.tokens
        return complete

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


def _error(ending: Ending) -> pb.RequestError:
    return pb.RequestError(code=ending.code, message=ending.message, param=ending.param)


def _too_large(size_bytes: int) -> Ending:
    return Ending(
        EndingKind.REJECTED,
        "result_too_large",
        f"the result takes {size_bytes} bytes, at most {MAX_REQUEST_BYTES} can be stored; ask for fewer logprobs",
        "sampling.logprobs",
    )
