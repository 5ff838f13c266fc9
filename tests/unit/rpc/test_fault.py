"""Of a message that cannot be decoded the field is named for which it cannot, on every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.files.v1 import files_pb2
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.queue.servicer import BOUNDS
from services.rpc.encoding import wrapped
from services.rpc.fault import MOST_DEPTH, Search
from services.rpc.first_look import FirstLook
from services.rpc.strict import BadInputError, _checked, _decoder

KINDS = {
    method.input_type.full_name: method.input_type
    for service in (
        queue_pb2.DESCRIPTOR.services_by_name["QueueService"],
        files_pb2.DESCRIPTOR.services_by_name["FilesService"],
        scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    )
    for method in service.methods
}

MARK = "some ~~~ text"
HALF = b"\xed\xa0\xbd"


def marked(kind: Descriptor, within: tuple[Descriptor, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield for each text that a message can have its path, and a message that has MARK there."""
    for field in [field for field in kind.fields if field.message_type not in (*within, kind)]:
        if field.type == FieldDescriptor.TYPE_STRING:
            message: Any = GetMessageClass(kind)()
            if field.is_repeated:
                getattr(message, field.name).extend(["good", MARK])
                yield f"{field.name}[1]", message
            else:
                setattr(message, field.name, MARK)
                yield field.name, message
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for path, part in marked(field.message_type, (*within, kind)):
                message = GetMessageClass(kind)()
                place = "[1]" if field.is_repeated else ""
                if field.is_repeated:
                    getattr(message, field.name).add()
                    getattr(message, field.name).append(part)
                else:
                    getattr(message, field.name).CopyFrom(part)
                yield f"{field.name}{place}.{path}", message


CASES = [(name, path, message) for name, kind in KINDS.items() for path, message in marked(kind)]


def test_there_are_texts_in_most_calls() -> None:
    assert len({name for name, _, _ in CASES}) > 25
    assert "requests[1].chat.tools.tools_json" in {path for _, path, _ in CASES}


@pytest.mark.parametrize(("name", "path", "message"), CASES, ids=[f"{name}.{path}" for name, path, _ in CASES])
def test_a_text_that_is_no_utf_8_is_named(name: str, path: str, message: Any) -> None:
    data = message.SerializeToString().replace(b"~~~", HALF)
    decode = _decoder(GetMessageClass(KINDS[name]), FirstLook(KINDS[name], BOUNDS), 0)
    with pytest.raises(BadInputError) as refused:
        _checked(decode(data))
    assert str(refused.value) == f"{path}: has half a surrogate pair, which UTF-8 cannot say, at byte 5 of 13"


@pytest.mark.parametrize(
    ("data", "path", "text"),
    [
        (b"\x0a\x02\xff\xff", "request_id", "is not UTF-8 at byte 0 of 2"),
        (b"\x0a\x01\xed", "request_id", "is not UTF-8 at byte 0 of 1"),
        (b"\x0a\x03\xed\x9f\x80\x0a\x03a\xed\xff", "request_id", "is not UTF-8 at byte 1 of 3"),
        (b"\x12\x04\x0a\x01a\x12", "idempotency_key", "a field has no end, at byte 3 of 4"),
        (b"\x0a", "", "a field has no end, at byte 0 of 1"),
        (b"\x00\x00", "", "field number 0, at byte 0 of 2"),
        (b"\x0f", "", "wire type 7, at byte 0 of 1"),
        (b"\x98\x80\x80\x80\x80\x00\x00", "", "cannot be decoded"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, path: str, text: str) -> None:
    assert Search().fault(queue_pb2.GetRequest.DESCRIPTOR, data) == (path, text)


def test_a_message_that_repeats_itself_in_itself_is_looked_into_so_far() -> None:
    top = request_pb2.TokenLogprob.DESCRIPTOR.fields_by_name["top"]
    tag = bytes([top.number << 3 | 2])
    data = b""
    for _ in range(5000):
        data = wrapped(tag, data)
    path, text = Search().fault(request_pb2.TokenLogprob.DESCRIPTOR, data)
    assert path == "top[0]" + MOST_DEPTH * ".top[0]"
    assert text == "cannot be decoded; it has more than 16 messages within one another"
