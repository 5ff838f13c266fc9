"""What must be one of several things and is none of them is refused by its field, and stands for nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from penstock.queue.v1 import queue_pb2 as pb
from penstock.request.v1.request_pb2 import Request
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import ids, serving, text
from tests.unit.queue.test_service import all_events, results

IDS_OR_BATCH = "subject: exactly one of request_ids and batch must be set"
OPENED_SUBMIT = pb.SubmitRequest(open=pb.SubmitOpen())
OPENED_BACKLOG = pb.BacklogRequest(messages=[pb.SchedulerToQueue(open=pb.BacklogOpen(instance_id="s"))])
OPENED_WORK = pb.WorkRequest(messages=[pb.WorkerToQueue(open=pb.WorkOpen(worker_id="w", instance_id="i"))])

NOTHING: dict[str, tuple[list[Message], str]] = {
    "Watch": ([pb.WatchRequest(tokens=True, until_now=True)], IDS_OR_BATCH),
    "Watch after": ([pb.WatchRequest(cursor=7, until_now=True)], IDS_OR_BATCH),
    "Cancel": ([pb.CancelRequest()], IDS_OR_BATCH),
    "Delete": ([pb.DeleteRequest(up_to=1)], IDS_OR_BATCH),
    "RequeueDead": ([pb.RequeueDeadRequest()], "subject: exactly one of request_ids and all must be set"),
    "Get": ([pb.GetRequest()], "key: exactly one of request_id and idempotency_key must be set"),
    "SubmitUnary": ([pb.SubmitUnaryRequest(requests=[Request()])], "requests[0].prompt: exactly one of"),
    "Submit": ([pb.SubmitRequest()], "message: the first message of a Submit stream must be `open`"),
    "Submit later": ([OPENED_SUBMIT, pb.SubmitRequest()], "message: every message after the first must be `batch`"),
    "Backlog": ([pb.BacklogRequest(messages=[pb.SchedulerToQueue()])], "messages: the first message"),
    "Backlog later": (
        [OPENED_BACKLOG, pb.BacklogRequest(messages=[pb.SchedulerToQueue()])],
        "messages.message: none of the known messages is set",
    ),
    "Work": ([pb.WorkRequest(messages=[pb.WorkerToQueue()])], "messages: the first message"),
    "Work later": (
        [OPENED_WORK, pb.WorkRequest(messages=[pb.WorkerToQueue()])],
        "messages.message: none of the known messages is set",
    ),
    "Work ending": (
        [OPENED_WORK, pb.WorkRequest(messages=[pb.WorkerToQueue(complete=pb.Complete())])],
        "messages.complete.ending: exactly one of result and failure must be set",
    ),
}
"""What is sent to a method, and what is said of it: each oneof that a peer of the queue may leave empty."""


@pytest.mark.parametrize("case", NOTHING)
async def test_nothing_is_refused(case: str) -> None:
    messages, said = NOTHING[case]
    method = f"/{pb.DESCRIPTOR.services_by_name['QueueService'].full_name}/{case.partition(' ')[0]}"
    async with serving(Telemetry(None), MemoryStore()) as peer:
        await peer.submit(text())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{peer.port}") as channel:
            start: Any = channel.stream_stream(method)
            call = start(iter([message.SerializeToString() for message in messages]))
            with suppress(grpc.aio.AioRpcError):
                async for _answer in call:
                    pass
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await call.details()).startswith(said)


async def test_the_batch_without_a_name_is_watched_by_whoever_says_so() -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        alone, _of_a_batch = await peer.submit(text(), text(batch="b"))
        await peer.stub.Cancel(pb.CancelRequest(request_ids=ids(alone)))
        seen = await all_events(peer.stub.Watch(pb.WatchRequest(batch="")))
        assert [result.result.request_id for result in results(seen)] == [alone]
