"""Several prompts in one body: one request of the queue for each, under one name that every gateway can read.

The requests are a batch of the queue, so they are cancelled and deleted together, and the key of each follows from the
name, so that anybody who has the name finds all of them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.openai.answers import COMPLETION_PREFIX, Line, body_of, usage_of, whole_usage
from penstock.openai.chunks import Chunks
from penstock.openai.shape import Shape
from penstock.request.v1 import request_pb2 as pb

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

    def requests(self, whole: pb.Request, prompts: Sequence[str | list[int]]) -> list[pb.Request]:
        """Return the request of each prompt; in all else they are as `whole`."""
        rest = pb.Request()
        rest.CopyFrom(whole)
        rest.ClearField("prompt")
        # Read for each from bytes: a message keeps the memory of what was cleared in it, and so does one set over.
        content = rest.SerializeToString()
        found = []
        for number, prompt in enumerate(prompts):
            request = pb.Request.FromString(content)
            request.batch = self.batch
            request.idempotency_key = self.key(number)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.ids.extend(prompt)
            found.append(request)
        return found


def body_of_all(name: str, shape: Shape, results: Sequence[pb.Result]) -> Line:
    """Return the response body of completed requests, in the order of their prompts, as vLLM's server joins them."""
    if len(results) == 1:
        return body_of(shape, results[0])
    bodies = [body_of(shape, result) for result in results]
    choices = [choice for body in bodies for choice in body["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    usage = whole_usage(*results)
    created = min(body["created"] for body in bodies)
    joined = {"id": f"{COMPLETION_PREFIX}-{name}", "created": created, "choices": choices, "usage": usage}
    return bodies[0] | joined


class JoinedChunks:
    """The chunks of several requests in one stream; told of the events of all of them."""

    def __init__(self, chunks: Sequence[Chunks], request_ids: Sequence[str], usage: bool) -> None:
        """Write each request's events with its own `chunks`; with `usage`, token counts come last."""
        self._chunks = dict(zip(request_ids, chunks, strict=True))
        self._results: dict[str, pb.Result] = {}
        self._usage = usage

    def of_delta(self, delta: pb.TokenDelta) -> list[str]:
        """Return the chunks for new tokens; raises DivergedError."""
        return self._chunks[delta.request_id].of_delta(delta)

    def of_result(self, result: pb.Result) -> list[str]:
        """Return the last chunks of a completed request, and after the last one's the counts; raises DivergedError."""
        chunks = self._chunks[result.request_id]
        lines = chunks.of_result(result)
        self._results[result.request_id] = result
        if self._usage and len(self._results) == len(self._chunks):
            lines.append(chunks.usage_line(usage_of(*self._results.values())))
        return lines
