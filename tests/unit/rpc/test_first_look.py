"""What is too much is refused by its bytes, before it is decoded into something much larger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from penstock.files.v1 import files_pb2
from penstock.limits import MAX_MESSAGE_BYTES, MAX_NAME_BYTES
from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.queue.servicer import BOUNDS
from services.rpc.first_look import MAX_ENTRIES, MAX_OTHERS, FirstLook, TooMuchError

METHODS = [
    method
    for service in (
        pb.DESCRIPTOR.services_by_name["QueueService"],
        files_pb2.DESCRIPTOR.services_by_name["FilesService"],
        scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    )
    for method in service.methods
]


def texts(kind: Descriptor) -> Iterator[tuple[str, ...]]:
    """Yield where the texts of a message are, but those of messages that repeat."""
    for field in kind.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field.name,)
        elif field.message_type is not None and not field.is_repeated:
            yield from ((field.name, *rest) for rest in texts(field.message_type))


def with_text(kind: Descriptor, path: tuple[str, ...], text: str) -> bytes:
    message: Any = GetMessageClass(kind)()
    part = message
    for name in path[:-1]:
        part = getattr(part, name)
    held = getattr(part, path[-1])
    if isinstance(held, str):
        setattr(part, path[-1], text)
    else:
        held.append(text)
    return bytes(message.SerializeToString())


NAMES = [(method.input_type, path) for method in METHODS for path in texts(method.input_type)]


@pytest.mark.parametrize(("kind", "path"), NAMES, ids=[f"{kind.name}.{'.'.join(path)}" for kind, path in NAMES])
def test_every_text_of_a_call_is_a_name(kind: Descriptor, path: tuple[str, ...]) -> None:
    look = FirstLook(kind, BOUNDS)
    look.check(with_text(kind, path, "é" * (MAX_NAME_BYTES // 2)))
    with pytest.raises(TooMuchError, match=f"^{'.'.join(path)}: {MAX_NAME_BYTES + 1} bytes; at most {MAX_NAME_BYTES}"):
        look.check(with_text(kind, path, "x" * (MAX_NAME_BYTES + 1)))


def test_content_is_no_name() -> None:
    large = "x" * 1_000_000
    request = request_pb2.Request(text=large)
    for message in (
        pb.SubmitUnaryRequest(requests=[request]),
        pb.SubmitRequest(batch=pb.SubmitBatch(requests=[pb.TaggedRequest(request=request)])),
        files_pb2.AppendFileRequest(data=large.encode()),
        files_pb2.PutRecordsRequest(puts=[files_pb2.PutRecord(record=files_pb2.Record(value=large.encode()))]),
    ):
        FirstLook(message.DESCRIPTOR, BOUNDS).check(message.SerializeToString())


@pytest.mark.parametrize(
    ("kind", "entry", "path", "most"),
    [
        (pb.SubmitUnaryRequest, pb.SubmitUnaryRequest(requests=[request_pb2.Request()]), "requests", 1000),
        (pb.SubmitRequest, pb.SubmitBatch(requests=[pb.TaggedRequest()]), "batch.requests", 20_000),
        (pb.CancelRequest, pb.RequestIds(ids=[""]), "request_ids.ids", 10_000),
        (pb.FollowRequest, pb.FollowRequest(follow=[pb.FollowedRequest()]), "follow", 100_000),
        (pb.FollowRequest, pb.FollowRequest(leave=[""]), "leave", 100_000),
        (pb.WorkRequest, pb.WorkRequest(messages=[pb.WorkerToQueue()]), "messages", MAX_ENTRIES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_repeats_is_counted(kind: Any, entry: Any, path: str, most: int) -> None:
    look = FirstLook(kind.DESCRIPTOR, BOUNDS)

    def times(count: int) -> bytes:
        entries: bytes = entry.SerializeToString() * count
        if "." not in path:
            return entries
        message = kind()
        getattr(message, path.partition(".")[0]).MergeFromString(entries)
        encoded: bytes = message.SerializeToString()
        return encoded

    look.check(times(most))
    with pytest.raises(TooMuchError, match=rf"^{path}: more than {most} given; at most {most} are allowed$"):
        look.check(times(most + 1))


def test_millions_of_entries_are_not_walked_over() -> None:
    """It would be seconds; and what is counted is not what comes after."""
    entry = pb.SubmitUnaryRequest(requests=[request_pb2.Request(sampling=request_pb2.SamplingParams())])
    data = entry.SerializeToString() * 1001 + b"\xff" * (MAX_MESSAGE_BYTES - 10_000)
    with pytest.raises(TooMuchError, match="requests: more than 1000"):
        FirstLook(pb.SubmitUnaryRequest.DESCRIPTOR, BOUNDS).check(data)


def test_nothing_is_gained_by_many_parts_nor_by_fields_that_nobody_knows() -> None:
    part = pb.SubmitRequest(batch=pb.SubmitBatch(requests=[pb.TaggedRequest()] * 1000)).SerializeToString()
    for data in (part * 100, b"\xf8\x07\x00" * 40_000):
        with pytest.raises(TooMuchError, match=f"^more than {20_000 + MAX_OTHERS} fields in one message$"):
            FirstLook(pb.SubmitRequest.DESCRIPTOR, BOUNDS).check(data)


def test_what_a_later_version_repeats_is_passed_over() -> None:
    FirstLook(pb.StatsRequest.DESCRIPTOR, BOUNDS).check(b"\xf8\x07\x00" * 10_000)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # a text without its length
        b"\x0a\x05abc",  # one that is shorter than it says
        b"\x12\x02\x0a\x05abcdefg",  # one that is longer than what it is in
        b"\x80" * 11 + bytes(2),  # a number of more than 64 bits
        b"\x0d\x00",  # four bytes that are two
        b"\x0b\x0c",  # a group
    ],
)
def test_what_is_no_message_is_none(data: bytes) -> None:
    kind = pb.GetRequest
    with pytest.raises(ValueError, match=r"end|wire type") as wrong:
        FirstLook(kind.DESCRIPTOR, {}).check(data)
    assert not isinstance(wrong.value, TooMuchError)
    if data != b"\x0b\x0c":
        with pytest.raises(DecodeError):
            kind.FromString(data)


def test_numbers_of_every_kind_are_passed_over() -> None:
    message = request_pb2.SamplingParams(temperature=0.5, seed=-1, max_tokens=300, stop=["x"])
    look = FirstLook(message.DESCRIPTOR, {})
    look.check(message.SerializeToString() + b"\xf9\x07" + bytes(8) + b"\xfd\x07" + bytes(4))
