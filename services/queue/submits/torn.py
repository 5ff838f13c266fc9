"""Frames of a Submit stream that cannot be decoded as a whole, cut at their requests.

A client that submits for many has one stream for all of them: a text of one that is no UTF-8 must cost the others
nothing. Protobuf decodes a frame as a whole or not at all. So each request of such a frame is decoded alone, and those
that cannot be are refused by their tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from penstock.queue.v1 import queue_pb2
from services.core.value import Value
from services.queue.core.entry import Failure
from services.rpc.encoding import length_tag, number_tag
from services.rpc.fault import Search
from services.rpc.fields import field_at, number
from services.rpc.strict import BadInputError

MAX_PARTS: Final = 16
"""Fields of a TaggedRequest among which its tag is looked for: it has two."""

MAX_TAG: Final = (1 << 64) - 1

_OPEN: Final = length_tag(queue_pb2.SubmitRequest, "open")[0]
_BATCH: Final = length_tag(queue_pb2.SubmitRequest, "batch")[0]
_REQUESTS: Final = length_tag(queue_pb2.SubmitBatch, "requests")[0]
_TAG: Final = number_tag(queue_pb2.TaggedRequest, "tag")[0]


class Undecoded(Value):
    """A request that cannot be decoded. Nothing is kept of it but whose it is and what is wrong."""

    def __init__(self, tag: int, failure: Failure, size_bytes: int) -> None:
        """Refuse one of `size_bytes` for `failure`."""
        self.tag, self.failure, self.size_bytes = tag, failure, size_bytes

    def ByteSize(self) -> int:  # noqa: N802 - as a message has it
        """Return how many bytes it has on the wire."""
        return self.size_bytes


Piece: TypeAlias = queue_pb2.TaggedRequest | Undecoded


class Torn:
    """A frame that cannot be decoded, but cut."""

    def __init__(self, data: bytes) -> None:
        """Find the requests; raises ValueError if nobody can say where they are."""
        self._data = data
        self._places: list[tuple[int, int]] = []
        batches = 0
        for tag, start, end in _fields(data):
            if tag == _OPEN:
                raise ValueError("it opens the stream")
            if tag == _BATCH:
                batches += 1
                found = _fields(data[start:end])
                self._places += [(start + first, start + last) for inner, first, last in found if inner == _REQUESTS]
        if not batches:
            raise ValueError("it has no requests")

    def pieces(self) -> Iterator[Piece]:
        """Decode one request after the other; raises BadInputError at one of which nobody can say whose it is."""
        search = Search()  # for all of them, so that a frame costs no more than one
        for place, (start, end) in enumerate(self._places):
            data = self._data[start:end]
            try:
                piece: Piece = queue_pb2.TaggedRequest.FromString(data)
            except DecodeError:
                piece = _undecoded(search, place, data)
            yield piece


def _undecoded(search: Search, place: int, data: bytes) -> Undecoded:
    tag = 0
    try:
        for count, (kind, start, _) in enumerate(_fields(data), 1):
            if count > MAX_PARTS:
                raise ValueError(f"more than {MAX_PARTS} fields")
            if kind == _TAG:
                tag = number(data, start)[0] & MAX_TAG
    except ValueError as error:
        raise BadInputError(f"batch.requests[{place}]: {error}") from None
    fault = search.fault(queue_pb2.TaggedRequest.DESCRIPTOR, data)
    param = fault.path.removeprefix("request.") or "request"
    return Undecoded(tag, Failure("invalid_request", f"{param}: {fault.text}", param), len(data))


def _fields(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the tag of each field, and where its content begins and ends; raises ValueError at one that has no end."""
    at = 0
    while at < len(data):
        try:
            tag, start, end = field_at(data, at)
        except ValueError as error:
            raise ValueError(f"{error}, at byte {at} of {len(data)}") from None
        yield tag, start, end
        at = end
