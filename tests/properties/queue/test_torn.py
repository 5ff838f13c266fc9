"""A frame that is cut says what the same frame says as a whole, but for what is wrong with it."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.v1 import queue_pb2 as pb
from services.queue.submits.torn import Torn, Undecoded
from services.rpc.strict import BadInputError
from tests.support.arbitrary import frames, fuzzed, messages

MARK = "a mark that nothing else has"
BROKEN = b"\xff" * len(MARK)

tagged = messages(pb.TaggedRequest)


def framed(requests: list[pb.TaggedRequest]) -> bytes:
    return pb.SubmitRequest(batch=pb.SubmitBatch(requests=requests)).SerializeToString()


@fuzzed
@given(st.lists(tagged, max_size=5))
def test_a_frame_without_fault_is_cut_into_its_requests(requests: list[pb.TaggedRequest]) -> None:
    assert [*Torn(framed(requests)).pieces()] == requests


@fuzzed
@given(st.lists(st.tuples(tagged, st.booleans()), min_size=1, max_size=5))
def test_what_is_wrong_with_one_request_concerns_that_one_only(drawn: list[tuple[pb.TaggedRequest, bool]]) -> None:
    for item, is_bad in drawn:
        if is_bad:
            item.request.client_reference = MARK
    requests = [item for item, _ in drawn]
    pieces = [*Torn(framed(requests).replace(MARK.encode(), BROKEN)).pieces()]
    assert [piece.tag for piece in pieces] == [item.tag for item in requests]
    for piece, (item, is_bad) in zip(pieces, drawn, strict=True):
        if isinstance(piece, Undecoded):
            assert is_bad
            assert piece.failure.param == "client_reference"
        else:
            assert not is_bad
            assert piece == item


@fuzzed
@given(frames(pb.SubmitRequest))
def test_any_frame_is_cut_or_is_none(frame: bytes) -> None:
    try:
        whole = pb.SubmitRequest.FromString(frame)
    except DecodeError:
        whole = None
    try:
        pieces = [*Torn(frame).pieces()]
    except (ValueError, BadInputError):
        return
    undecoded = [piece for piece in pieces if isinstance(piece, Undecoded)]
    assert all(piece.failure.message.startswith(f"{piece.failure.param}: ") for piece in undecoded)
    if whole is None:
        assert undecoded, "what is wrong is wrong with one of them"
    else:
        assert pieces == [*whole.batch.requests]
