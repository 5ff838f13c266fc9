"""Who speaks first on a client's streams, and how they end once the client has said that it will say no more."""

from __future__ import annotations

from typing import Any

import grpc

from penstock.queue.v1 import queue_pb2 as pb
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import ids, serving, text


async def rest_of(call: Any) -> list[Any]:
    """Return what is still said on a stream, once it has ended."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_a_submit_stream_ends_when_all_is_acked() -> None:
    tagged = [pb.TaggedRequest(tag=tag, request=text()) for tag in range(1000)]
    async with serving(Telemetry(None), MemoryStore()) as peer:
        call = peer.stub.Submit()
        await call.write(pb.SubmitRequest(open=pb.SubmitOpen()))
        await call.write(pb.SubmitRequest(batch=pb.SubmitBatch(requests=tagged)))
        await call.done_writing()
        assert (await call.read()).HasField("open")
        acked = [ack.tag for response in await rest_of(call) for ack in response.acks.acks]
        assert acked == list(range(1000))
        assert await call.code() is grpc.StatusCode.OK


async def test_a_follow_stream_begins_with_any_frame_and_ends_when_all_that_is_followed_has_ended() -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        (name,) = await peer.submit(text())
        call = peer.stub.Follow()
        await call.write(pb.FollowRequest())
        assert await call.read() == pb.FollowResponse()
        await call.write(pb.FollowRequest(follow=[pb.FollowedRequest(request_id=name)]))
        await call.done_writing()
        await peer.settled()
        await peer.stub.Cancel(pb.CancelRequest(request_ids=ids(name)))
        told = [event.result.result.request_id for response in await rest_of(call) for event in response.events]
        assert told == [name]
        assert await call.code() is grpc.StatusCode.OK
