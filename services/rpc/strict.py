"""gRPC handlers that answer bad input with INVALID_ARGUMENT and a clear text, and send what is encoded as it is.

gRPC's own decoder reports bytes that are no message as an internal error of the
server. These handlers decode themselves, and turn `BadInputError` raised anywhere in a
servicer into INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from services.rpc.encoding import encoded


class BadInputError(Exception):
    """The peer sent something it may not send; the text names the field."""


class _Malformed:
    """Stands for bytes that could not be decoded."""

    def __init__(self, text: str) -> None:
        self.text = text


def add_servicer(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    """Serve every method of `service` with the coroutine or async generator of that name on `servicer`."""
    handlers = {}
    for method in service.methods:
        decode = _decoder(GetMessageClass(method.input_type))
        call = getattr(servicer, method.name)
        kind, wrap = _KINDS[method.client_streaming, method.server_streaming]
        handlers[method.name] = kind(wrap(call), decode, encoded)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _decoder(kind: type[Message]) -> Callable[[bytes], Any]:
    name = kind.DESCRIPTOR.full_name

    def decode(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return _Malformed(f"{len(data)} bytes are not a valid {name}: {error}")

    return decode


def _checked(message: Any) -> Any:
    if isinstance(message, _Malformed):
        raise BadInputError(message.text)
    return message


async def _checked_stream(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _checked(message)


def _one_to_one(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(_checked(request), context)
        except BadInputError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle


def _one_to_many(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in call(_checked(request), context):
                yield response
        except BadInputError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle


def _many_to_one(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(_checked_stream(requests), context)
        except BadInputError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle


def _many_to_many(call: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in call(_checked_stream(requests), context):
                yield response
        except BadInputError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle


_KINDS: dict[tuple[bool, bool], tuple[Any, Any]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, _one_to_one),
    (False, True): (grpc.unary_stream_rpc_method_handler, _one_to_many),
    (True, False): (grpc.stream_unary_rpc_method_handler, _many_to_one),
    (True, True): (grpc.stream_stream_rpc_method_handler, _many_to_many),
}
