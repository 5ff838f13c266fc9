"""What is too long or too many in a call to the queue is refused by its field."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest

from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1.request_pb2 import Request
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import serving

LONG = "x" * 513
LARGE = "x" * 300_000
TAGGED = [pb.TaggedRequest(request=Request(text="some text"))]

TOO_MUCH = {
    "Submit long": (pb.SubmitRequest(open=pb.SubmitOpen(client_id=LONG)), "open.client_id: 513 bytes"),
    "Submit large": (pb.SubmitRequest(open=pb.SubmitOpen(client_id=LARGE)), "open.client_id: 300000 bytes"),
    "Submit many": (
        pb.SubmitRequest(batch=pb.SubmitBatch(requests=TAGGED * 20_001)),
        "batch.requests: more than 20000",
    ),
    "SubmitUnary": (pb.SubmitUnaryRequest(requests=[Request()] * 1001), "requests: more than 1000"),
    "Get": (pb.GetRequest(request_id=LONG), "request_id: 513 bytes"),
    "GetMany": (pb.GetManyRequest(keys=["x"] * 1001), "keys: more than 1000"),
    "GetMany long": (pb.GetManyRequest(keys=["x", LONG]), "keys: 513 bytes"),
    "GetMany tenant": (pb.GetManyRequest(keys=["x"], tenant=LONG), "tenant: 513 bytes"),
    "Watch": (pb.WatchRequest(request_ids=pb.RequestIds(ids=["x", LONG])), "request_ids.ids: 513 bytes"),
    "Cancel": (pb.CancelRequest(request_ids=pb.RequestIds(ids=["x"] * 10_001)), "request_ids.ids: more than 10000"),
    "RequeueDead": (pb.RequeueDeadRequest(request_ids=pb.RequestIds(ids=[LONG])), "request_ids.ids: 513 bytes"),
    "Follow": (pb.FollowRequest(follow=[pb.FollowedRequest(request_id="x")] * 100_001), "follow: more than 100000"),
    "Backup": (pb.BackupRequest(name=LONG), "name: 513 bytes"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_too_much_is_refused(case: str) -> None:
    message, text = TOO_MUCH[case]
    method = f"/{pb.DESCRIPTOR.services_by_name['QueueService'].full_name}/{case.partition(' ')[0]}"
    async with (
        serving(Telemetry(None), MemoryStore()) as peer,
        grpc.aio.insecure_channel(f"127.0.0.1:{peer.port}") as channel,
    ):
        start: Any = channel.stream_stream(method)
        call = start(iter([message.SerializeToString()]))
        with suppress(grpc.aio.AioRpcError):
            async for _answer in call:
                pass
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await call.details()).startswith(text)
