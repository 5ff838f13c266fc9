"""gRPC handlers that answer bad input with INVALID_ARGUMENT and a clear text, and send what is encoded as it is.

gRPC's own decoder reports bytes that are no message as an internal error of the server. These handlers decode
themselves, name the field for which that cannot be done, and turn `BadInputError` raised anywhere in a servicer into
INVALID_ARGUMENT, `ReaderFailedError` into INTERNAL. They also count the calls of each host, and end those that never
say anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from penstock.errors import ANSWERED, ERROR_CODE
from penstock.limits import MAX_NAME_BYTES
from services.auth.guard import Guard
from services.auth.keyring import NotAllowedError
from services.rpc.encoding import encoded
from services.rpc.fault import Search
from services.rpc.first_look import FirstLook, TooMuchError
from services.rpc.limits import FIRST_MESSAGE_S, MAX_CALLS_OF_HOST

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


STREAMED_UNSEEN_BYTES = 256 * 1024
"""Up to this size a message of a stream is decoded without a look at it first: few of a stream's are larger, and what
it becomes, some hundred times as much at the worst, is bounded well enough."""


SAID = ((ANSWERED, "1"),)
"""Trailing metadata of every status that a service gives."""


class BadInputError(Exception):
    """The peer sent something it may not send; the text names the field."""


class ReaderFailedError(Exception):
    """The reader of a stream failed in a way nobody expected. The log says how; the peer is told INTERNAL."""

    def __init__(self) -> None:
        """Say so without the details, which are the service's own."""
        super().__init__("the service failed while it read this stream; its log says how")


class _Malformed:
    """Stands for bytes that could not be decoded."""

    def __init__(self, text: str) -> None:
        self.text = text


async def abort_with_code(context: Context, status: grpc.StatusCode, text: str, code: str) -> NoReturn:
    """End a call for one of several reasons that have the same status; `code` says which.

    No other place gives a status metadata: gRPC sends what it is given here instead of what there was (`SAID`).
    """
    await context.abort(status, text, (*SAID, (ERROR_CODE, code)))


class Doorkeeper:
    """Counts the open calls of each host, so that one host cannot take the calls of all."""

    def __init__(self, most: int = MAX_CALLS_OF_HOST) -> None:
        """Let a host have `most` calls open at once."""
        self._most = most
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of open calls."""
        return self._open.total()

    async def admit(self, context: Context) -> None:
        """Count the call that this task serves until it is over; ends it with RESOURCE_EXHAUSTED if its host has many.

        It is over once its task is, which also sends the answer: who asks much and takes no answer has the calls open.
        """
        host = context.peer().rpartition(":")[0]
        if self._open[host] >= self._most:
            text = f"this host has {self._most} calls open already; at most so many are allowed"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        task = asyncio.current_task()
        assert task is not None, "a call is served by a task"
        self._open[host] += 1
        # Not the context's callback, which holds the context, and is held by it.
        task.add_done_callback(lambda _: self._leave(host))

    def _leave(self, host: str) -> None:
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]


def add_servicer(
    service: ServiceDescriptor,
    servicer: object,
    server: grpc.aio.Server,
    doorkeeper: Doorkeeper | None = None,
    guard: Guard | None = None,
    bounds: Mapping[str, int] = MappingProxyType({}),
    torn: Mapping[str, Callable[[bytes], Any]] = MappingProxyType({}),
) -> None:
    """Serve every method of `service` with the coroutine or async generator of that name on `servicer`.

    To gRPC every method is one that reads a stream, also where the API has one message: gRPC itself waits for that one
    without end and without telling, while here a call that says nothing is counted, and ended after a while.

    `bounds` are those of the first look that large messages get. A message that cannot be decoded ends its call, unless
    `torn` has something by the name of its type: that is given the bytes then, and what it returns is read in the place
    of the message; it raises ValueError if the call is to end all the same.
    """
    if doorkeeper is None:  # one who counts no call yet is false
        doorkeeper = Doorkeeper()
    guard = guard or Guard()
    handlers = {}
    for method in service.methods:
        look_from = STREAMED_UNSEEN_BYTES if method.client_streaming else MAX_NAME_BYTES
        kind, look = GetMessageClass(method.input_type), FirstLook(method.input_type, bounds)
        decode = _decoder(kind, look, look_from, torn.get(method.input_type.name))
        call = getattr(servicer, method.name)
        read = _stream_of if method.client_streaming else _one_of
        if method.server_streaming:
            handle = _to_many(call, read, _Door(doorkeeper, guard, method.name))
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(handle, decode, encoded)
        else:
            handle = _to_one(call, read, _Door(doorkeeper, guard, method.name))
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(handle, decode, encoded)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _decoder(
    kind: type[Message], look: FirstLook, look_from: int, torn: Callable[[bytes], Any] | None = None
) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            if len(data) > look_from:
                look.check(data)
            return kind.FromString(data)
        except TooMuchError as error:
            return _Malformed(str(error))
        except (DecodeError, ValueError):
            return _not_decoded(cast(Descriptor, kind.DESCRIPTOR), data, torn)

    return decode


def _not_decoded(kind: Descriptor, data: bytes, torn: Callable[[bytes], Any] | None) -> Any:
    """Return what `torn` makes of a message that cannot be decoded, or what is to be said of it."""
    if torn is not None:
        with suppress(ValueError):
            return torn(data)
    path, text = Search().fault(kind, data)
    return _Malformed(f"{path}: {text}" if path else f"{len(data)} bytes are not a valid {kind.full_name}: {text}")


def _checked(message: Any) -> Any:
    if isinstance(message, _Malformed):
        raise BadInputError(message.text)
    return message


async def _first_of(context: Context) -> Any:
    """Return the first message, EOF if there is none; ends the call if it does not come in time.

    In two halves: a loop that has stood still hears that the time is over before it hears what came meanwhile.
    """
    half_s, loop = FIRST_MESSAGE_S / 2, asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            second = loop.call_later(half_s, lambda: limit.reschedule(loop.time() + half_s))
            try:
                return await context.read()
            finally:
                second.cancel()
    except TimeoutError:
        text = f"the first message did not come within {FIRST_MESSAGE_S:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)


async def _one_of(context: Context) -> Any:
    first = await _first_of(context)
    if first is grpc.aio.EOF:
        raise BadInputError("the call ended without a message")
    return _checked(first)


async def _stream_of(context: Context) -> AsyncIterator[Any]:
    return _checked_stream(await _first_of(context), context)


async def _checked_stream(message: Any, context: Context) -> AsyncIterator[Any]:
    while message is not grpc.aio.EOF:
        yield _checked(message)
        message = await context.read()


Read: TypeAlias = Callable[[Context], Awaitable[Any]]
"""Turns what gRPC reads into the argument of a method: one message, or a stream of them.

It asks the context for each. gRPC's own iterator is a cycle with the generator inside it, which holds the message that
it gave last: unless it was read to its end, both would wait for the garbage collector.
"""


class _Door:
    """Where the calls of one method come in."""

    def __init__(self, doorkeeper: Doorkeeper, guard: Guard, method: str) -> None:
        self._doorkeeper, self._guard, self._method = doorkeeper, guard, method

    @asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[None]:
        """Serve a call inside; ends it if it may not be made, or if the servicer refuses its input or its caller."""
        context.set_trailing_metadata(SAID)  # so that its client knows the service's words from gRPC's
        await self._doorkeeper.admit(context)
        async with self._guard.admit(self._method, context):
            try:
                yield
            except BadInputError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except ReaderFailedError as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
            except NotAllowedError as error:
                await self._guard.refuse(error, context)


def _to_one(call: Callable[..., Any], read: Read, door: _Door) -> Callable[..., Any]:
    async def handle(_requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            async with door.admit(context):
                return await call(await read(context), context)
        except grpc.aio.AbortError as error:
            _part_from_its_call(error)
            raise

    return handle


def _to_many(call: Callable[..., Any], read: Read, door: _Door) -> Callable[..., Any]:
    async def handle(_requests: AsyncIterator[Any], context: Context) -> None:
        try:
            async with door.admit(context), aclosing(call(await read(context), context)) as responses:
                async for response in responses:
                    # Written here and not yielded to gRPC: a call that the guard ends while gRPC writes for it would
                    # end outside of `admit`, and its client would never be told a status.
                    await context.write(response)
        except grpc.aio.AbortError as error:
            _part_from_its_call(error)
            raise

    return handle


def _part_from_its_call(error: BaseException | None) -> None:
    """Have an error, and what it was raised for, no longer lead to the frames that it has passed.

    gRPC keeps the error that ended a call in the call's state. The frames hold the call's context, and it the state:
    with all that they hold, the message first of all, they would wait for the garbage collector, which comes seldom
    (`GC_THRESHOLDS`).
    """
    while error is not None:
        before = error.__context__ or error.__cause__
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error = before
