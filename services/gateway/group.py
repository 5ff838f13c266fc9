"""Several prompts in one body: one request of the queue for each, under one name that every gateway can read.

The requests are a batch of the queue, so they are cancelled and deleted together, and the key of each follows from the
name, so that anybody who has the name finds all of them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.openai.answers import COMPLETION_PREFIX, Line, body_of, usage_of, whole_usage
from penstock.openai.chunks import Chunks, Parted
from penstock.openai.jsontext import Rows
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb
from services.gateway.limits import MAX_ANSWERS_BYTES
from services.gateway.problem import NO_RETRY, Problem
from services.gateway.reply import LARGE_BYTES

NAME = re.compile(r"(several-[0-9a-f]{32})-([1-9][0-9]{0,4})")

NAME_BYTES = 16
"""Of what a name is drawn from: as many as of any random id."""


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one body."""

    batch: str
    count: int

    @classmethod
    def of(cls, idempotency_key: str, count: int) -> Group:
        """Return the group of `count` prompts; always the same for a key, a new one without."""
        drawn = secrets.token_bytes(NAME_BYTES)
        if idempotency_key:
            drawn = hashlib.blake2b(idempotency_key.encode(), digest_size=NAME_BYTES).digest()
        return cls(f"several-{drawn.hex()}", count)

    @classmethod
    def named(cls, name: str) -> Group | None:
        """Return the group whose name this is; None if it is another request's."""
        found = NAME.fullmatch(name)
        return cls(found[1], int(found[2])) if found else None

    @property
    def name(self) -> str:
        """What clients know it by: the request id of the whole."""
        return f"{self.batch}-{self.count}"

    def key(self, prompt: int) -> str:
        """Return the idempotency key of one prompt's request."""
        return f"{self.batch}:{prompt}"

    def requests(self, whole: pb.Request, prompts: Sequence[str | list[int]]) -> Iterator[pb.Request]:
        """Yield the request of each prompt, made when its turn comes; in all else they are as `whole`."""
        # Read for each from bytes: a message keeps the memory of what was cleared in it, and so does one set over.
        content = _shared(whole).SerializeToString()
        for number, prompt in enumerate(prompts):
            request = pb.Request.FromString(content)
            self._put(request, number, prompt)
            yield request

    def sizes_bytes(self, whole: pb.Request, prompts: Sequence[str | list[int]]) -> Iterator[int]:
        """Yield what each of `requests` takes, encoded, of which none is made for it."""
        shared_bytes = _shared(whole).ByteSize()
        for number, prompt in enumerate(prompts):
            own = pb.Request()
            self._put(own, number, prompt)
            yield shared_bytes + own.ByteSize()

    def _put(self, request: pb.Request, number: int, prompt: str | list[int]) -> None:
        """Write into `request` what it has for itself alone."""
        request.batch = self.batch
        request.idempotency_key = self.key(number)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)


def _shared(whole: pb.Request) -> pb.Request:
    """Return what the requests of all prompts have in common."""
    shared = pb.Request()
    shared.CopyFrom(whole)
    for own in ("prompt", "batch", "idempotency_key"):
        shared.ClearField(own)
    return shared


class Gathered:
    """The results of one body, kept until the last of them has come; of what is large together only the size is."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        """Await those of these requests."""
        self._count = len(request_ids)
        self._kept: dict[str, bytes] = dict.fromkeys(request_ids, b"")
        """Encoded: as it came a result would hold on to its frame, with everybody's events."""
        self._missing = set(request_ids)
        self.size_bytes = 0
        """Of those that have come, encoded."""

    @property
    def whole(self) -> bool:
        """Whether all have come."""
        return not self._missing

    @property
    def large(self) -> bool:
        """Whether they are to be read again: for how long a client takes to read them nobody knows."""
        return self.size_bytes >= LARGE_BYTES

    def add(self, result: pb.Result, size_bytes: int) -> None:
        """Keep a result of this size; raises Problem if all together are more than one answer can be."""
        self.size_bytes = check_answers(self.size_bytes + size_bytes, self._count)
        self._missing.discard(result.request_id)
        if self.large:
            self._kept.clear()
        else:
            self._kept[result.request_id] = result.SerializeToString()

    def body(self, name: str, shape: Shape) -> Line:
        """Return the response body of all of them, which are not large."""
        return body_of_all(name, shape, [pb.Result.FromString(content) for content in self._kept.values()])


def check_answers(size_bytes: int, count: int) -> int:
    """Return the size of the results of `count` prompts; raises Problem if it is more than one answer can be.

    That of a single prompt is bounded where it is made.
    """
    if count > 1 and size_bytes > MAX_ANSWERS_BYTES:
        text = f"the answers of all prompts take more than {MAX_ANSWERS_BYTES} bytes together"
        more = "ask for a stream, or for fewer prompts in a body"
        raise Problem(400, f"{text}: {more}", "prompt", "result_too_large", NO_RETRY)
    return size_bytes


def body_of_all(name: str, shape: Shape, results: Sequence[pb.Result]) -> Line:
    """Return the response body of completed requests, in the order of their prompts, as vLLM's server joins them.

    It is there to be written as JSON, once.
    """
    if len(results) == 1:
        return body_of(shape, results[0], Rows)
    bodies = [body_of(shape, result, Rows) for result in results]
    choices = [choice for body in bodies for choice in body["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    usage = whole_usage(*[result.usage for result in results])
    created = min(body["created"] for body in bodies)
    joined = {"id": f"{COMPLETION_PREFIX}-{name}", "created": created, "choices": choices, "usage": usage}
    return bodies[0] | joined


class JoinedChunks:
    """The chunks of several requests in one stream; told of the events of all of them."""

    def __init__(self, chunks: Sequence[Chunks], request_ids: Sequence[str], usage: bool) -> None:
        """Write each request's events with its own `chunks`; with `usage`, token counts come last."""
        self._chunks = dict(zip(request_ids, chunks, strict=True))
        self._usages: dict[str, pb.Usage] = {}
        """All that is kept of a prompt that has been told to its end: its result may take 12 MiB."""
        self._usage = usage

    def of_delta(self, delta: pb.TokenDelta) -> list[str]:
        """Return the chunks for new tokens; raises DivergedError."""
        return self._chunks[delta.request_id].of_delta(delta)

    def opening(self) -> list[str]:
        """Return the chunks before everything else: of completions, as these are, there are none."""
        return []

    def untold(self, result: pb.Result) -> float:
        """Return what share of a result is still to be told."""
        return self._chunks[result.request_id].untold(result)

    def of_result(self, result: pb.Result) -> list[str]:
        """Return the last chunks of a completed request, and after the last one's the counts; raises DivergedError."""
        return ["".join(line) for line in self.ending(result.request_id)(result)]

    def ending(self, request_id: str) -> Callable[[pb.Result], Iterator[Parted]]:
        """Return what does that of one request, of which nothing is told any more, as often as it is asked to."""
        chunks = self._chunks.pop(request_id)
        last = self._usage and not self._chunks

        def last_lines(result: pb.Result) -> Iterator[Parted]:
            yield from chunks.last_lines(result)
            usage = pb.Usage()
            usage.CopyFrom(result.usage)  # as it is it would hold on to the result
            self._usages[request_id] = usage
            if last:
                yield (chunks.usage_line(usage_of(*self._usages.values())),)

        return last_lines
