"""The queue as a process: kills, restarts, directories and ports that cannot be had, garbage on the port."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.core.records import META, SCHEMA_KEY
from services.queue.storage.rocksdb_store import RocksdbStore

pytestmark = pytest.mark.processes

START_S = 60


class Process:
    """One queue service process."""

    def __init__(self, data_dir: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "services.queue", "--listen", listen, "--data-dir", str(data_dir), *flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK_", "OTEL_"))}
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def ready(self) -> grpc.Channel:
        """Wait for the ready line; return a channel to the service."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line.startswith("ready: queue on 127.0.0.1:"), line or self.popen.communicate()[1]
        self.address = line.split()[-1]
        return grpc.insecure_channel(self.address)

    def kill(self) -> None:
        """End the process as a crash would."""
        self.popen.kill()
        self.popen.wait(START_S)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return exit status and what was written to stderr."""
        _, errors = self.popen.communicate(timeout=START_S)
        return self.popen.returncode, errors


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def begin(data_dir: Path, *flags: str, listen: str = "127.0.0.1:0") -> Process:
        started.append(Process(data_dir, *flags, listen=listen))
        return started[-1]

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.kill()
        process.popen.communicate()


def submit(stub: queue_pb2_grpc.QueueServiceStub, *keys: str) -> list[queue_pb2.SubmitAck]:
    requests = [request_pb2.Request(text="hi", batch="b", idempotency_key=key) for key in keys]
    return list(stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=requests)).acks)


def test_what_was_acked_survives_kill_9_and_is_not_taken_twice(start: Start, tmp_path: Path) -> None:
    keys = [f"k{n}" for n in range(200)]
    names: dict[str, str] = {}
    for round_ in range(3):
        process = start(tmp_path)
        stub = queue_pb2_grpc.QueueServiceStub(process.ready())
        for ack, key in zip(submit(stub, *keys[: 60 * (round_ + 1)]), keys, strict=False):
            assert names.setdefault(key, ack.request_id) == ack.request_id
        process.kill()
    stub = queue_pb2_grpc.QueueServiceStub(start(tmp_path).ready())
    for name in names.values():
        assert stub.Get(queue_pb2.GetRequest(request_id=name)).state == queue_pb2.REQUEST_STATE_READY
    stats = stub.Stats(queue_pb2.StatsRequest())
    assert sum(channel.ready for channel in stats.channels) == len(names) == 180


@pytest.mark.parametrize("flag", [(), ("--backup-dir", "elsewhere")])
def test_what_a_kill_left_of_a_backup_is_gone_after_the_next_start(
    start: Start, tmp_path: Path, flag: tuple[str, ...]
) -> None:
    flags = [*flag[:1], *(str(tmp_path / name) for name in flag[1:])]
    left = tmp_path / (flag[-1] if flag else "queue-backups") / ".nightly.partial"
    (left / "data").mkdir(parents=True)
    start(tmp_path / "queue", *flags).ready()
    assert not left.exists()


def test_results_and_leases_survive_kill_9(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path)
    stub = queue_pb2_grpc.QueueServiceStub(process.ready())
    done, running = (ack.request_id for ack in submit(stub, "a", "b"))
    say = queue_pb2.WorkerToQueue
    opening = say(open=queue_pb2.WorkOpen(worker_id="w", instance_id="1"))
    claims = [say(claim=queue_pb2.Claim(request_id=name)) for name in (done, running)]
    leases: dict[str, queue_pb2.LeaseRef] = {}
    with Talk(stub, opening, *claims) as talk:
        while len(leases) < 2:
            message = talk.next()
            if message.HasField("deliver"):
                leases[message.deliver.lease.request_id] = message.deliver.lease
        talk.say(say(complete=completion(leases[done], "once")))
        assert talk.next().recorded.accepted
    process.kill()

    stub = queue_pb2_grpc.QueueServiceStub(start(tmp_path).ready())
    assert stub.Get(queue_pb2.GetRequest(request_id=done)).result.choices[0].text == "once"
    assert stub.Get(queue_pb2.GetRequest(request_id=running)).state == queue_pb2.REQUEST_STATE_LEASED
    opening.open.held.extend(leases.values())
    with Talk(stub, opening) as talk:
        assert talk.next().HasField("open")
        lost = talk.next().cancel
        assert (lost.lease, lost.reason) == (leases[done], queue_pb2.CANCEL_REASON_LEASE_LOST)
        talk.say(say(complete=completion(leases[done], "twice")))
        assert not talk.recorded().accepted
        talk.say(say(complete=completion(leases[running], "held")))
        assert talk.recorded().accepted
    texts = [
        event.result.result.choices[0].text
        for frame in stub.Watch(queue_pb2.WatchRequest(batch="b"))
        for event in frame.events
        if event.HasField("result")
    ]
    assert texts == ["once", "held"]


def completion(lease: queue_pb2.LeaseRef, text: str) -> queue_pb2.Complete:
    result = request_pb2.Result(outcome=request_pb2.OUTCOME_COMPLETED, choices=[request_pb2.Choice(text=text)])
    return queue_pb2.Complete(lease=lease, result=result)


class Talk:
    """A Work stream over blocking gRPC."""

    def __init__(self, stub: queue_pb2_grpc.QueueServiceStub, *first: queue_pb2.WorkerToQueue) -> None:
        self._out: queue.SimpleQueue[queue_pb2.WorkRequest | None] = queue.SimpleQueue()
        self.say(*first)
        self._call = stub.Work(iter(self._out.get, None))
        self._inbox: list[queue_pb2.QueueToWorker] = []

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.put(None)
        self._call.cancel()

    def say(self, *messages: queue_pb2.WorkerToQueue) -> None:
        self._out.put(queue_pb2.WorkRequest(messages=messages))

    def next(self) -> queue_pb2.QueueToWorker:
        while not self._inbox:
            self._inbox += next(self._call).messages
        return self._inbox.pop(0)

    def recorded(self) -> queue_pb2.Recorded:
        while not (message := self.next()).HasField("recorded"):
            pass
        return message.recorded


def test_sigterm_ends_open_streams_and_exits_0(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path)
    stub = queue_pb2_grpc.QueueServiceStub(process.ready())
    opening = queue_pb2.WorkerToQueue(open=queue_pb2.WorkOpen(worker_id="w", instance_id="1"))
    with Talk(stub, opening) as talk:
        talk.next()
        watch = stub.Watch(queue_pb2.WatchRequest(batch="b", follow=True))
        next(watch)
        process.popen.send_signal(signal.SIGTERM)
        assert process.ended()[0] == 0


def test_sigterm_acks_what_a_submit_stream_sent_and_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    """Also an idle one: clients keep theirs open, and a stop must not wait for them."""
    process = start(tmp_path)
    said: queue.SimpleQueue[queue_pb2.SubmitRequest | None] = queue.SimpleQueue()
    said.put(queue_pb2.SubmitRequest(open=queue_pb2.SubmitOpen(client_id="c")))
    stream = queue_pb2_grpc.QueueServiceStub(process.ready()).Submit(iter(said.get, None))
    try:
        assert next(stream).HasField("open")
        tagged = queue_pb2.TaggedRequest(tag=1, request=request_pb2.Request(text="hi"))
        said.put(queue_pb2.SubmitRequest(batch=queue_pb2.SubmitBatch(requests=[tagged])))
        assert [ack.tag for ack in next(stream).acks.acks] == [1]
        process.popen.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the queue service is stopping" in str(ended.value.details())
        assert process.ended()[0] == 0
    finally:
        said.put(None)


def test_a_locked_directory_ends_the_second_with_69(start: Start, tmp_path: Path) -> None:
    start(tmp_path).ready()
    status, errors = start(tmp_path).ended()
    assert status == 69
    assert "is locked: another queue service uses it" in errors
    assert "Traceback" not in errors


def test_a_newer_schema_ends_with_69_and_both_versions(start: Start, tmp_path: Path) -> None:
    store = RocksdbStore(tmp_path)
    store.write([Write(META, SCHEMA_KEY, b"7")])
    store.close()
    status, errors = start(tmp_path).ended()
    assert status == 69
    assert "schema version 7; this program knows version 3" in errors
    assert "Traceback" not in errors


def test_a_port_in_use_ends_with_69(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, errors = start(tmp_path, listen=f"127.0.0.1:{taken.getsockname()[1]}").ended()
    assert status == 69
    assert "the port is in use by another process" in errors
    assert "Traceback" not in errors


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--max-attempts", "0"), "--max-attempts: "),
        (("--default-channel", "nope"), "--default-channel: "),
        (("--no-such-flag", "1"), "no-such-flag"),
        (("--lease-s", "soon"), "--lease-s: "),
    ],
)
def test_wrong_settings_end_with_78_and_their_name(
    start: Start, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    status, errors = start(tmp_path, *flags).ended()
    assert status == 78
    assert named in errors
    assert "Traceback" not in errors


def test_garbage_on_the_port_leaves_others_alone(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path)
    stub = queue_pb2_grpc.QueueServiceStub(process.ready())
    host, _, port = process.address.rpartition(":")
    for garbage in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536)):
        with socket.create_connection((host, int(port)), timeout=START_S) as line:
            line.sendall(garbage)
    assert len(submit(stub, "a")) == 1
    assert process.popen.poll() is None


def test_a_frame_beyond_the_limit_ends_its_call_only(start: Start, tmp_path: Path) -> None:
    stub = queue_pb2_grpc.QueueServiceStub(start(tmp_path).ready())
    huge = request_pb2.Request(text="x" * (64 * 1024 * 1024))
    with pytest.raises(grpc.RpcError) as error:
        stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=[huge]))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(submit(stub, "a")) == 1


def test_health_answers_and_reflection_if_it_is_asked_for(start: Start, tmp_path: Path) -> None:
    channel = start(tmp_path / "shut").ready()
    service = "penstock.queue.v1.QueueService"
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as error:
        list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask])))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    channel = start(tmp_path / "open", "--penstock-reflection", "true").ready()
    (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
    assert service in {found.name for found in answer.list_services_response.service}
