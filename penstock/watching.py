"""Watches requests over reconnects: every result once, tokens in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from penstock.connection import Connection, Patience
from penstock.errors import NotFound
from penstock.loaded import grpc
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from penstock.results import Progress, Result, TokenDelta, result_from, tokens_from

if TYPE_CHECKING:
    from penstock.queue.v1.queue_pb2_grpc import QueueServiceAsyncStub

MAX_POSITIONS = 65_536
"""Requests whose tokens are followed at once: as many as sixteen workers may have leases for."""

Event: TypeAlias = Result | TokenDelta | Progress

Joined: TypeAlias = Callable[[], Awaitable[None]]
"""What is to be done before the events of a stream are handed on, at the beginning and after a reconnect."""


@dataclass(slots=True)
class _Position:
    """How much of one completion has been handed on."""

    attempt: int
    tokens: int = 0
    characters: int = 0


class WatchSession:
    """One watch of a batch or of named requests.

    A batch is resumed after the last result's cursor; of named requests only
    those without a result are asked for again.
    """

    def __init__(
        self,
        stub: QueueServiceAsyncStub,
        connection: Connection,
        batch: str | None,
        request_ids: Sequence[str],
        cursor: int = 0,
        tokens: bool = False,
        follow: bool = False,
        joined: Joined | None = None,
        until_now: bool = False,
    ) -> None:
        """Watch `batch`, or `request_ids` if it is None; `joined` is awaited when a stream has its first answer."""
        self._stub = stub
        self._connection = connection
        self._batch = batch
        self._open_ids = dict.fromkeys(request_ids)
        self._cursor = cursor
        self._tokens = tokens
        self._follow = follow
        self._until_now = until_now
        self._joined = joined
        self._seen = TokenPositions()

    async def wire_events(self) -> AsyncGenerator[pb.WatchEvent, None]:
        """Yield events as they come off the wire, results and tokens never twice, until the watch is over.

        Raises NotFound for an id that is unknown or has no result any more, and Unavailable if the queue stays away.
        """
        patience = self._connection.patience()
        while self._batch is not None or self._open_ids:
            try:
                async with aclosing(self._one_stream(patience)) as stream:
                    async for events in stream:
                        for event in events:
                            yield event
                break
            except grpc.aio.AioRpcError as error:
                await self._connection.wait_or_raise(patience, error)
        if self._batch is None and self._open_ids:
            raise NotFound(f"request_ids: {next(iter(self._open_ids))!r} has no result any more")

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield results, tokens and progress as plain objects.

        Raises NotFound at the end of a batch, watched from the beginning, of which there was no result.
        """
        known = self._batch is None or self._cursor > 0 or self._follow
        async with aclosing(self.wire_events()) as wire:
            async for event in wire:
                match event.WhichOneof("event"):
                    case "result":
                        known = True
                        yield result_from(event.result.result, event.result.cursor)
                    case "tokens":
                        yield tokens_from(event.tokens)
                    case "progress":
                        yield Progress(event.progress.waiting, event.progress.running)
        if not known:
            raise NotFound(f"nothing is known of the batch {self._batch!r}")

    async def _one_stream(self, patience: Patience) -> AsyncGenerator[list[pb.WatchEvent], None]:
        """Yield what one stream has that is new, what came together together."""
        call = self._stub.Watch(self._request())
        joined = self._joined
        # Closed, as it and the call hold each other, and of a stream that is left before its end the last answer too.
        answers = aclosing(cast("AsyncGenerator[pb.WatchResponse, None]", aiter(call)))
        try:
            async with answers as responses:
                async for response in responses:
                    patience.succeeded()  # also by an answer without events: the queue listens
                    if joined is not None:
                        await joined()
                        joined = None
                    if events := [event for event in response.events if self._is_new(event)]:
                        yield events
        finally:
            call.cancel()

    def _request(self) -> pb.WatchRequest:
        request = pb.WatchRequest(
            cursor=self._cursor, tokens=self._tokens, follow=self._follow, until_now=self._until_now
        )
        if self._batch is not None:
            request.batch = self._batch
        else:
            request.cursor = 0
            request.request_ids.ids.extend(self._open_ids)
        return request

    def _is_new(self, event: pb.WatchEvent) -> bool:
        match event.WhichOneof("event"):
            case "result":
                result = event.result
                self._cursor = max(self._cursor, result.cursor)
                if self._tokens or self._batch is None:
                    request_id = result.result.request_id
                    self._seen.forget(request_id)
                    return self._batch is not None or self._open_ids.pop(request_id, 0) is None
            case "tokens":
                return self._seen.advance(event.tokens)
        return True


class TokenPositions:
    """How far the tokens of each running completion have been handed on.

    A result that was deleted before it was read never comes: of more than MAX_POSITIONS requests without one, those of
    which nothing was heard for longest are forgotten.
    """

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._seen: OrderedDict[str, dict[int, _Position]] = OrderedDict()

    def advance(self, delta: request_pb2.TokenDelta) -> bool:
        """Cut off `delta` what has been seen; return whether anything is left that joins without a gap.

        A higher attempt starts again, a lower one is over. After a reconnect the first delta has everything from the
        start. What leaves a gap is left out, with all that follows it: the result has it.
        """
        positions = self._seen.setdefault(delta.request_id, {})
        self._seen.move_to_end(delta.request_id)
        if len(self._seen) > MAX_POSITIONS:
            self._seen.popitem(last=False)
        position = positions.get(delta.index)
        if position is None or delta.attempt > position.attempt:
            position = positions[delta.index] = _Position(delta.attempt)
        if delta.attempt < position.attempt or delta.offset not in {0, position.tokens}:
            return False
        if delta.offset < position.tokens:
            del delta.token_ids[: position.tokens]
            del delta.logprobs[: position.tokens]
            delta.text = delta.text[position.characters :]
            delta.offset = position.tokens
        position.tokens += len(delta.token_ids)
        position.characters += len(delta.text)
        return bool(delta.token_ids or delta.text)

    def has_part_of(self, delta: request_pb2.TokenDelta) -> bool:
        """Whether some of `delta` has been seen, which `advance` cuts off or all of which it leaves out."""
        position = self._seen.get(delta.request_id, {}).get(delta.index)
        return position is not None and delta.attempt == position.attempt and delta.offset < position.tokens

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has ended."""
        self._seen.pop(request_id, None)


class Transcript:
    """What a reader has been given of the latest attempt of one request.

    Text and token ids are kept, not the deltas: one that came off the wire holds on to the frame it came in.
    """

    def __init__(self) -> None:
        """Nothing has been given."""
        self._attempt = 0
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}

    def add(self, delta: request_pb2.TokenDelta) -> None:
        """Note what is given next; a higher attempt starts again."""
        if delta.attempt > self._attempt:
            self._begin(delta.attempt)
        self._texts.setdefault(delta.index, []).append(delta.text)
        self._token_ids.setdefault(delta.index, []).extend(delta.token_ids)

    def rest(self, result: request_pb2.Result) -> list[request_pb2.TokenDelta]:
        """Return what `result` has beyond what was given, or all of it, as a later attempt, if it does not go on there.

        What is not sent, because the queue or the worker's stream to it is away, comes with the result alone.
        """
        if not all(self._goes_on(choice) for choice in result.choices):
            self._begin(max(result.attempts, self._attempt + 1))
        rest = []
        for choice in result.choices:
            tokens, characters = len(self._token_ids.get(choice.index, ())), len(self._text(choice.index))
            delta = request_pb2.TokenDelta(
                request_id=result.request_id,
                attempt=self._attempt or result.attempts,
                index=choice.index,
                offset=tokens,
                token_ids=choice.token_ids[tokens:],
                text=choice.text[characters:],
                logprobs=choice.logprobs[tokens:],
            )
            if delta.token_ids or delta.text:
                rest.append(delta)
        return rest

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._texts.clear()
        self._token_ids.clear()

    def _goes_on(self, choice: request_pb2.Choice) -> bool:
        token_ids = self._token_ids.get(choice.index, [])
        return choice.token_ids[: len(token_ids)] == token_ids and choice.text.startswith(self._text(choice.index))

    def _text(self, index: int) -> str:
        return "".join(self._texts.get(index, ()))
