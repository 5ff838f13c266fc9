"""Calls of streaming methods whose frames are encoded by the caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

StreamMethod: TypeAlias = Callable[[AsyncIterator[bytes]], Any]
"""Takes encoded frames; returns the call, which yields the peer's frames decoded."""


def stream_method(channel: grpc.aio.Channel, service: ServiceDescriptor, name: str) -> StreamMethod:
    """Return a method of `service` that is a stream in both directions."""
    method = service.methods_by_name[name]
    path = f"/{service.full_name}/{name}"
    decode = GetMessageClass(method.output_type).FromString
    call: StreamMethod = channel.stream_stream(path, _as_is, decode)
    return call


def _as_is(frame: bytes) -> bytes:
    return frame
