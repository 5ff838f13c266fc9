"""What cannot be decoded of one request of a frame is that request's fault, and costs no other one anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from penstock.queue.v1 import queue_pb2 as pb
from services.queue.submits.torn import MAX_PARTS, Torn, Undecoded
from services.queue.submits.turns import SUBMITS_AT_ONCE
from services.rpc.fault import MOST_FIELDS
from services.rpc.strict import BadInputError
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import Peer, Request, refused, serving

SERVICE = pb.DESCRIPTOR.services_by_name["QueueService"].full_name
ACCEPTED, INVALID = pb.SUBMIT_STATUS_ACCEPTED, pb.SUBMIT_STATUS_INVALID

GOOD = Request(text="hi")
MARK = "half of an emoji: ~~~"
HALF = b"\xed\xa0\xbd"
"""What JavaScript writes for the first half of an emoji that was cut in two."""


def torn(message: Any, by: bytes = HALF) -> bytes:
    """Return a message on the wire with `by` in place of each "~~~"."""
    data: bytes = message.SerializeToString()
    assert b"~~~" in data
    return data.replace(b"~~~", by)


def batch(requests: Iterable[Request], first_tag: int = 0) -> pb.SubmitRequest:
    tagged = [pb.TaggedRequest(tag=first_tag + place, request=request) for place, request in enumerate(requests)]
    return pb.SubmitRequest(batch=pb.SubmitBatch(requests=tagged))


def wrapped(content: bytes) -> bytes:
    """Return a SubmitRequest whose batch is `content`, of less than 128 bytes."""
    return b"\x12" + bytes([len(content)]) + content


class Stream:
    """An open Submit stream of a client that writes what it likes."""

    def __init__(self, peer: Peer) -> None:
        start: Any = peer.channel.stream_stream(f"/{SERVICE}/Submit", None, pb.SubmitResponse.FromString)
        self.call = start()

    async def open(self) -> Stream:
        await self.call.write(pb.SubmitRequest(open=pb.SubmitOpen()).SerializeToString())
        assert (await self.call.read()).WhichOneof("message") == "open"
        return self

    async def acks(self, frame: bytes, count: int) -> list[pb.SubmitAck]:
        await self.call.write(frame)
        got: list[pb.SubmitAck] = []
        while len(got) < count:
            response = await self.call.read()
            assert response is not grpc.aio.EOF, await self.call.details()
            got += response.acks.acks
        return got


def refusals(peer: Peer) -> float:
    return peer.registry.get_sample_value("penstock_queue_refused_submits_total", {"cause": "invalid"}) or 0


@pytest.mark.parametrize("count", [1, 3, 2 * SUBMITS_AT_ONCE + 3])
async def test_the_rest_of_the_frame_is_taken(count: int) -> None:
    bad = {place for place in range(count) if place % 100 == 7 or count == 1}
    requests = [Request(text=MARK) if place in bad else GOOD for place in range(count)]
    async with serving(Telemetry(None), MemoryStore()) as peer:
        stream = await Stream(peer).open()
        frame = batch(requests, 1000)
        acks = await stream.acks(torn(frame) if bad else frame.SerializeToString(), count)
        assert [ack.tag for ack in acks] == [*range(1000, 1000 + count)]
        assert {ack.tag - 1000 for ack in acks if ack.status == INVALID} == bad
        assert all(ack.status == ACCEPTED and ack.request_id for ack in acks if ack.tag - 1000 not in bad)
        for place in bad:
            error = acks[place].error
            assert (error.code, error.param) == ("invalid_request", "text")
            assert error.message == "text: has half a surrogate pair, which UTF-8 cannot say, at byte 18 of 21"
        (ack,) = await stream.acks(batch([GOOD]).SerializeToString(), 1)  # the stream goes on
        assert ack.status == ACCEPTED
        assert peer.service.servicer._bytes._count == 0
        assert refusals(peer) == len(bad)
        stats = await peer.stub.Stats(pb.StatsRequest())
        assert sum(channel.ready for channel in stats.channels) == count - len(bad) + 1


def at_fault() -> dict[str, Request]:
    """Return requests with "~~~" in one field, by its path."""
    made = {}
    for path in ("text", "channel", "tenant", "idempotency_key", "model", "batch", "client_reference", "traceparent"):
        made[path] = Request(text="hi")
        setattr(made[path], path, MARK)
    made["chat.messages_json"] = Request()
    made["chat.messages_json"].chat.messages_json = MARK
    made["chat.tools.tools_json"] = Request()
    made["chat.tools.tools_json"].chat.tools.tools_json = MARK
    made["sampling.stop[1]"] = Request(text="hi")
    made["sampling.stop[1]"].sampling.stop.extend(["good", MARK])
    made["sampling.structured_outputs.choice.values[2]"] = Request(text="hi")
    made["sampling.structured_outputs.choice.values[2]"].sampling.structured_outputs.choice.values.extend("ab")
    made["sampling.structured_outputs.choice.values[2]"].sampling.structured_outputs.choice.values.append(MARK)
    return made


@pytest.mark.parametrize("path", at_fault())
async def test_the_field_at_fault_is_named_whichever_it_is(path: str) -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        stream = await Stream(peer).open()
        good, bad = await stream.acks(torn(batch([GOOD, at_fault()[path]])), 2)
        assert (good.status, bad.status) == (ACCEPTED, INVALID)
        assert bad.error.param == path
        assert bad.error.message.startswith(f"{path}: ")
        start: Any = peer.channel.unary_unary(f"/{SERVICE}/SubmitUnary")
        call = start(torn(pb.SubmitUnaryRequest(requests=[GOOD, GOOD, at_fault()[path]])))
        await refused(call, grpc.StatusCode.INVALID_ARGUMENT, f"requests[2].{path}: has half a surrogate pair")
        stats = await peer.stub.Stats(pb.StatsRequest())
        assert sum(channel.ready for channel in stats.channels) == 1


NOT_ONE = {
    "text not in UTF-8": (b"\x5a\x02\xff\xfe", "text", "text: is not UTF-8 at byte 0 of 2"),
    "text without an end": (b"\x5a\x09ab", "request", "request: a field has no end, at byte 0 of 4"),
    "number without an end": (b"\x38\x80", "request", "request: a field has no end, at byte 0 of 2"),
    "sampling without an end": (b"\x72\x02\x08\x80", "sampling", "sampling: a field has no end, at byte 0 of 2"),
    "token ids without an end": (b"\x62\x03\x0a\x01\x80", "token_ids.ids", "token_ids.ids: is no list of numbers"),
}
"""Requests that cannot be decoded, the field at fault and what is said of it."""


@pytest.mark.parametrize("case", NOT_ONE)
def test_a_request_that_is_none_is_refused_by_its_tag(case: str) -> None:
    content, param, text = NOT_ONE[case]
    tagged = b"\x08\x07\x12" + bytes([len(content)]) + content
    good = pb.TaggedRequest(tag=8, request=GOOD)
    frame = b"\x0a" + bytes([len(tagged)]) + tagged + b"\x0a\x08" + good.SerializeToString()
    items = list(Torn(wrapped(frame)).pieces())
    assert items[1] == good
    assert isinstance(items[0], Undecoded)
    assert (items[0].tag, items[0].failure.param, items[0].failure.message) == (7, param, text)
    assert items[0].ByteSize() == len(tagged)


NO_FRAME = "are not a valid penstock.queue.v1.SubmitRequest"
TORN = wrapped(b"\x0a\x05\x12\x03\x5a\x01\xff")

BEYOND = {
    "no request": (b"\x12\x02\x0a\x7f", "batch: a field has no end, at byte 0 of 2"),
    "no batch": (b"\x12\x7f\x0a", f"3 bytes {NO_FRAME}: a field has no end, at byte 0"),
    "no tag": (wrapped(b"\x0a\x00\x0a\x03\x08\x80\x80"), "batch.requests[1]: a field has no end, at byte 0 of 3"),
    "opens it": (b"\x0a\x05\x0a\x03" + HALF, "open.client_id: has half a surrogate pair"),
    "opens it too": (b"\x0a\x00" + TORN, "batch.requests[0].request.text: is not UTF-8"),
    "nothing known": (b"\x98\x80\x80\x80\x80\x00\x00", f"7 bytes {NO_FRAME}: cannot be decoded"),
    "garbage": (b"\xff" * 40, f"40 bytes {NO_FRAME}: a number has no end, at byte 0"),
}
"""Frames of which nobody can say where their requests are, or whose they are."""


@pytest.mark.parametrize("case", BEYOND)
async def test_a_frame_that_cannot_be_cut_ends_the_stream_and_says_where(case: str) -> None:
    frame, text = BEYOND[case]
    async with serving(Telemetry(None), MemoryStore()) as peer:
        stream = await Stream(peer).open()
        (ack,) = await stream.acks(batch([GOOD]).SerializeToString(), 1)
        assert ack.status == ACCEPTED
        await stream.call.write(frame)
        await refused(stream.call.read(), grpc.StatusCode.INVALID_ARGUMENT, text)


async def test_a_stream_does_not_begin_with_a_frame_that_is_torn() -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        stream = Stream(peer)
        await stream.call.write(torn(batch([Request(text=MARK)])))
        text = "message: the first message of a Submit stream must be `open`"
        await refused(stream.call.read(), grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(("repeated", "named"), [(2, 3), (MOST_FIELDS // 2, 1), (100_000, 0)])
def test_of_one_frame_so_much_is_looked_at(repeated: int, named: int) -> None:
    """Who sends many bytes that say nothing has them read once, by protobuf."""
    request = b"\x38\x00" * repeated + b"\x5a\x01\xff"
    good = pb.SubmitBatch(requests=[pb.TaggedRequest(tag=3, request=GOOD)])
    tagged = b"\x08\x07\x12" + _length(request) + request
    content = (b"\x0a" + _length(tagged) + tagged) * 3 + good.SerializeToString()
    *bad, last = Torn(b"\x12" + _length(content) + content).pieces()
    assert last == good.requests[0]
    assert [piece.tag for piece in bad] == [7, 7, 7]
    params = [piece.failure.param for piece in bad if isinstance(piece, Undecoded)]
    assert params == ["text"] * named + ["request"] * (3 - named)


def _length(content: bytes) -> bytes:
    size, out = len(content), bytearray()
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


@pytest.mark.parametrize("last", [b"\x01", b"\x7f"])
def test_a_tag_is_the_lower_64_bits_of_its_number(last: bytes) -> None:
    tagged = b"\x08" + b"\xff" * 9 + last + b"\x12\x03\x5a\x01\xff"
    (piece,) = Torn(wrapped(b"\x0a" + bytes([len(tagged)]) + tagged)).pieces()
    assert piece.tag == 2**64 - 1


def test_a_tag_is_looked_for_among_a_few_fields() -> None:
    tagged = b"\x08\x07" * MAX_PARTS + b"\x12\x03\x5a\x01\xff"
    (piece,) = Torn(wrapped(b"\x0a" + bytes([len(tagged) - 2]) + tagged[2:])).pieces()
    assert piece.tag == 7
    with pytest.raises(BadInputError, match=r"batch\.requests\[0\]: more than"):
        list(Torn(wrapped(b"\x0a" + bytes([len(tagged)]) + tagged)).pieces())
