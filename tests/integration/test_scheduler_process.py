"""The scheduler as a process, between a fake queue and fake workers that speak real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.queue.v1 import queue_pb2 as q
from penstock.queue.v1 import queue_pb2_grpc
from penstock.scheduler.v1 import scheduler_pb2 as s
from penstock.scheduler.v1 import scheduler_pb2_grpc
from tests.support.ports import free_port
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
POLICY = "virtual-channels"
"""Books what can be told from a request alone, so that a test can name the numbers."""


class FakeQueue(queue_pb2_grpc.QueueServiceServicer):
    """Announces what it is told to, and keeps what the scheduler says."""

    def __init__(self) -> None:
        self.heard: list[q.SchedulerToQueue] = []
        self.streams: list[asyncio.Queue[q.QueueToScheduler]] = []

    async def Backlog(
        self, requests: AsyncIterator[q.BacklogRequest], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[q.BacklogResponse]:
        async def listen() -> None:
            async for frame in requests:
                self.heard.extend(frame.messages)

        listener = asyncio.create_task(listen())
        outgoing: asyncio.Queue[q.QueueToScheduler] = asyncio.Queue()
        self.streams.append(outgoing)
        channels = ["interactive", "batch"]
        opened = q.QueueToScheduler(open=q.BacklogOpen(channels=channels, store_id="store"))
        try:
            yield q.BacklogResponse(messages=[opened])
            while True:
                yield q.BacklogResponse(messages=[await outgoing.get()])
        finally:
            listener.cancel()

    async def announce(self, request_id: str, channel: str = "batch", **fields: int) -> None:
        """Announce a request with 100 prompt tokens on the newest stream, once there is one."""

        async def stream() -> asyncio.Queue[q.QueueToScheduler] | None:
            return self.streams[-1] if self.streams else None

        outgoing = await wait_for_async(stream, "a Backlog stream", PATIENCE_S)
        assert outgoing is not None
        sizes = {"prompt_tokens": 100, "max_tokens": 29, "n": 1, "attempt": 1, **fields}
        announce = q.Announce(request_id=request_id, channel=channel, **sizes)  # type: ignore[arg-type]
        outgoing.put_nowait(q.QueueToScheduler(announce=announce))


@dataclass
class FakeWorker:
    """One Credits stream."""

    call: grpc.aio.StreamStreamCall[s.CreditsRequest, s.CreditsResponse]
    epoch: int = 0
    unread: list[s.SchedulerToWorker] = field(default_factory=list)

    async def say(self, *messages: s.WorkerToScheduler) -> None:
        await self.call.write(s.CreditsRequest(messages=messages))

    async def hear(self) -> s.SchedulerToWorker:
        while not self.unread:
            frame = await asyncio.wait_for(self.call.read(), PATIENCE_S)
            assert isinstance(frame, s.CreditsResponse), "the stream has ended"
            self.unread.extend(frame.messages)
        return self.unread.pop(0)

    async def open(self, worker_id: str = "w1", **changes: object) -> s.CreditsOpened:
        await self.say(s.WorkerToScheduler(open=credits_open(worker_id=worker_id, **changes)))
        opened = (await self.hear()).open
        self.epoch = opened.epoch
        return opened

    async def settle(self, request_id: str, seq: int, held_blocks: int) -> None:
        ack = s.TokenizerAck(epoch=self.epoch, request_id=request_id, seq=seq, held_blocks=held_blocks)
        await self.say(s.WorkerToScheduler(tokenizer_ack=ack))

    async def release(self, request_id: str, seq: int) -> None:
        cause = s.RELEASE_CAUSE_COMPLETED
        ack = s.CompletionAck(epoch=self.epoch, request_id=request_id, seq=seq, cause=cause)
        await self.say(s.WorkerToScheduler(completion_ack=ack))

    async def fate(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end of the stream and return its status."""
        code = await asyncio.wait_for(self.call.code(), PATIENCE_S)
        return code, await self.call.details() or ""


def credits_open(**changes: object) -> s.CreditsOpen:
    fields: dict[str, object] = {
        "worker_id": "w1",
        "instance_id": "i1",
        "capacity_blocks": 10,
        "block_size": 32,
        "max_model_len": 320,
        "model": "tiny",
        "role": s.WORKER_ROLE_UNIFIED,
        "max_num_seqs": 8,
    }
    return s.CreditsOpen(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Rig:
    """A scheduler process, the fake queue it talks to, and a channel to it."""

    queue: FakeQueue
    queue_server: grpc.aio.Server
    queue_port: int
    process: asyncio.subprocess.Process
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    def worker(self) -> FakeWorker:
        return FakeWorker(self.stub.Credits())

    async def status(self) -> s.StatusResponse:
        return await self.stub.Status(s.StatusRequest())


async def start_scheduler(*flags: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start a scheduler and return it with its address once it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.scheduler",
        "--listen",
        "127.0.0.1:0",
        "--policy",
        POLICY,
        *flags,
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
    assert line.startswith("ready: scheduler on "), line
    return process, line.split()[-1]


async def start_queue(queue: FakeQueue, port: int) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    queue_pb2_grpc.add_QueueServiceServicer_to_server(queue, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    queue = FakeQueue()  # type: ignore[abstract]
    port = free_port()  # a stop and a start later it is still its own
    server = await start_queue(queue, port)
    process, address = await start_scheduler("--queue-address", f"127.0.0.1:{port}", "--epoch-grace-s", "0")
    async with grpc.aio.insecure_channel(address) as channel:
        made = Rig(queue, server, port, process, address, channel)
        yield made
    if process.returncode is None:
        process.kill()
        await process.wait()
    await made.queue_server.stop(None)


async def test_a_request_is_granted_settled_and_released(rig: Rig) -> None:
    worker = rig.worker()
    opened = await worker.open()
    assert (opened.policy, opened.report_interval_ns) == (POLICY, 20_000_000)
    await rig.queue.announce("r1")
    grant = (await worker.hear()).grant
    assert (grant.request_id, grant.channel, grant.booked_blocks, grant.settles) == ("r1", "batch", 4, True)
    await worker.settle("r1", 1, 3)
    report = s.EngineReport(epoch=worker.epoch, blocks_free=8, running=1, preemptions=2, kv_cache_usage=0.25)
    await worker.say(s.WorkerToScheduler(engine_report=report))
    status = await wait_for_async(lambda: reported(rig), "the report", PATIENCE_S)
    assert status is not None
    seen = status.workers[0]
    assert (seen.worker_id, seen.model, seen.connected, seen.reservations) == ("w1", "tiny", True, 1)
    assert (seen.capacity_blocks, seen.free_blocks, dict(seen.held_blocks)) == (10, 7, {"batch": 3})
    assert (seen.engine.running, seen.engine.preemptions) == (1, 2)
    assert (status.tokenizer_refunds, status.tokenizer_refund_blocks, status.grants) == (1, 1, 1)
    assert status.queue_connected
    await worker.release("r1", 2)
    await wait_for_async(lambda: all_home(rig), "the release", PATIENCE_S)
    windows = [message.window for message in rig.queue.heard if message.HasField("window")]
    assert {window.channel for window in windows} == {"interactive", "batch"}
    assert [list(window.served_models) for window in windows[-2:]] == [["", "tiny"]] * 2


async def reported(rig: Rig) -> s.StatusResponse | None:
    status = await rig.status()
    return status if status.workers[0].HasField("engine") else None


async def all_home(rig: Rig) -> bool:
    status = await rig.status()
    return status.workers[0].free_blocks == 10 and status.completion_refund_blocks == 3


async def test_a_killed_scheduler_is_rebuilt_from_inventory_and_announcements(rig: Rig) -> None:
    worker = rig.worker()
    await worker.open()
    await rig.queue.announce("r1")
    await worker.hear()
    rig.process.kill()
    await rig.process.wait()
    rig.queue.streams.clear()
    rig.process, address = await start_scheduler("--queue-address", f"127.0.0.1:{rig.queue_port}")
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            again = FakeWorker(stub.Credits())
            holding = s.Holding(request_id="r1", channel="batch", held_blocks=4, seq=5)
            opened = await again.open(inventory=[holding])
            assert opened.epoch > worker.epoch
            await rig.queue.announce("r1")
            await rig.queue.announce("r2")
            assert (await again.hear()).grant.request_id == "r2"
            status = await stub.Status(s.StatusRequest())
            assert dict(status.workers[0].held_blocks) == {"batch": 8}
            assert status.audit_violations == 0
    finally:
        rig.process.kill()
        await rig.process.wait()


async def test_a_new_stream_of_a_worker_replaces_the_old_one(rig: Rig) -> None:
    first, second = rig.worker(), rig.worker()
    await first.open()
    await second.open()
    code, details = await first.fate()
    assert code is grpc.StatusCode.ABORTED
    assert "w1" in details
    assert len((await rig.status()).workers) == 1


async def test_another_instance_of_a_connected_worker_is_refused_by_name(rig: Rig) -> None:
    first, second = rig.worker(), rig.worker()
    opened = await first.open()
    await second.say(s.WorkerToScheduler(open=credits_open(instance_id="another")))
    code, details = await second.fate()
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert details.startswith("worker_id: another instance of 'w1' is connected")
    assert [(seen.epoch, seen.connected) for seen in (await rig.status()).workers] == [(opened.epoch, True)]


WRONG_FIRST = [
    (s.WorkerToScheduler(leaving=s.Leaving(reason="x")), "open"),
    (s.WorkerToScheduler(), "open"),
    (s.WorkerToScheduler(open=credits_open(worker_id="")), "open.worker_id"),
    (s.WorkerToScheduler(open=credits_open(model="x" * 600)), "open.model"),
    (s.WorkerToScheduler(open=credits_open(capacity_blocks=0)), "open.capacity_blocks"),
    (s.WorkerToScheduler(open=credits_open(block_size=0)), "open.block_size"),
    (s.WorkerToScheduler(open=credits_open(max_model_len=0)), "open.max_model_len"),
    (s.WorkerToScheduler(open=credits_open(max_num_seqs=0)), "open.max_num_seqs"),
    (s.WorkerToScheduler(open=credits_open(role=0)), "open.role"),
    (s.WorkerToScheduler(open=credits_open(drain=s.Drain(version=1 << 63))), "open.drain.version"),
    (
        s.WorkerToScheduler(open=credits_open(inventory=[s.Holding(request_id="r", channel="c")] * 2)),
        "open.inventory[1].request_id",
    ),
]


async def test_a_wrong_first_message_is_refused_by_field(rig: Rig) -> None:
    for message, field_name in WRONG_FIRST:
        worker = rig.worker()
        await worker.say(message)
        code, details = await worker.fate()
        assert (code, details.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, field_name)


async def test_a_wrong_later_message_ends_its_own_stream_only(rig: Rig) -> None:
    good, bad = rig.worker(), rig.worker()
    await good.open("good")
    await bad.open("bad")
    await bad.say(s.WorkerToScheduler(completion_ack=s.CompletionAck(epoch=bad.epoch, request_id="r1", seq=1)))
    code, details = await bad.fate()
    assert (code, details.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "completion_ack.cause")
    await rig.queue.announce("r1")
    assert (await good.hear()).grant.request_id == "r1"


async def test_garbage_on_the_port_disturbs_nobody(rig: Rig) -> None:
    worker = rig.worker()
    await worker.open()
    host, port = rig.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(os.urandom(4096))
    await writer.drain()
    await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    call: grpc.aio.StreamStreamCall[bytes, bytes] = rig.channel.stream_stream(
        "/penstock.scheduler.v1.SchedulerService/Credits"
    )()
    await call.write(b"\xff" * 100)
    assert await asyncio.wait_for(call.code(), PATIENCE_S) is not grpc.StatusCode.OK
    await rig.queue.announce("r1")
    assert (await worker.hear()).grant.request_id == "r1"


async def test_a_drained_worker_is_told_and_gets_nothing_more(rig: Rig) -> None:
    drained, other = rig.worker(), rig.worker()
    await drained.open("w1")
    response = await rig.stub.DrainWorker(s.DrainWorkerRequest(worker_id="w1"))
    assert response.reservations == 0
    assert (await drained.hear()).drain == s.Drain(version=1, wanted=True)
    await other.open("w2")
    await rig.queue.announce("r1")
    assert (await other.hear()).grant.request_id == "r1"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await rig.stub.DrainWorker(s.DrainWorkerRequest(worker_id="nobody"))
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_queue_may_come_later_and_come_back(rig: Rig) -> None:
    worker = rig.worker()
    await worker.open()
    await rig.queue.announce("r1")
    await worker.hear()
    await rig.queue_server.stop(None)
    await wait_for_async(lambda: queue_is(rig, False), "the loss to be noticed", PATIENCE_S)
    rig.queue.streams.clear()
    rig.queue_server = await start_queue(rig.queue, rig.queue_port)
    await rig.queue.announce("r2")
    assert (await worker.hear()).grant.request_id == "r2"


async def queue_is(rig: Rig, connected: bool) -> bool:
    return (await rig.status()).queue_connected == connected


async def test_what_can_never_fit_is_rejected_to_the_queue(rig: Rig) -> None:
    worker = rig.worker()
    await worker.open()
    await rig.queue.announce("long", prompt_tokens=500)

    async def rejected() -> q.Reject | None:
        return next((message.reject for message in rig.queue.heard if message.HasField("reject")), None)

    reject = await wait_for_async(rejected, "the rejection", PATIENCE_S)
    assert reject is not None
    assert (reject.request_id, reject.error.code) == ("long", "context_length_exceeded")
    assert "500" in reject.error.message
    assert "320" in reject.error.message


async def test_health_reflection_metrics_and_a_clean_end() -> None:
    metrics = f"127.0.0.1:{free_port()}"
    process, address = await start_scheduler(
        "--queue-address", "127.0.0.1:9", "--metrics-listen", metrics, "--penstock-reflection", "true"
    )
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        checked = await health.Check(health_pb2.HealthCheckRequest(service="penstock.scheduler.v1.SchedulerService"))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for answer in call for service in answer.list_services_response.service}
        assert "penstock.scheduler.v1.SchedulerService" in names
        worker = FakeWorker(scheduler_pb2_grpc.SchedulerServiceStub(channel).Credits())
        await worker.open()

        async def exported() -> str | None:
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{metrics}/metrics").read().decode())
            return text if 'penstock_scheduler_free_blocks{worker="w1"} 10.0' in text else None

        text = await wait_for_async(exported, "the worker in the metrics", PATIENCE_S)
        assert text is not None
        for name in ("audit_violations_total 0.0", "arbitration_seconds_count", "queue_connected 0.0"):
            assert f"penstock_scheduler_{name}" in text
        process.send_signal(signal.SIGTERM)
        assert (await worker.fate())[0] is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--policy", "fastest"], 78, ["policy", "virtual-channels"]),
        (["--no-such-flag", "1"], 78, ["no-such-flag"]),
        (["--listen", "nonsense"], 78, ["listen"]),
    ],
)
def test_wrong_settings_are_named(flags: list[str], status: int, words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.scheduler", *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == status
    for word in words:
        assert word in ended.stderr


async def test_a_port_in_use_is_named(rig: Rig) -> None:
    command = [sys.executable, "-m", "services.scheduler", "--listen", rig.address, "--policy", POLICY]
    ended = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.PIPE)
    _, stderr = await asyncio.wait_for(ended.communicate(), PATIENCE_S)
    assert ended.returncode == 69
    assert "in use" in stderr.decode()
