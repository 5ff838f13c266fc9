"""API keys, roles and tenants between real processes under mutual TLS: who gets what, and who gets nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import penstock as public
from penstock.credentials import Credentials
from penstock.files.v1 import files_pb2, files_pb2_grpc
from penstock.limits import TARGET_FRAME_BYTES
from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.request.v1 import request_pb2
from penstock.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from penstock.tls import TlsFiles, open_channel
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_tls import LOCAL, issued, variables
from tests.support.fleet import Fleet
from tests.support.keyed import Keyed, Keyfile, RawReceiver
from tests.support.waiting import wait_for, wait_for_async

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PROMPT = "the-prompt-nobody-else-may-read"
PATIENCE_S = 30.0

UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
DENIED, NOT_FOUND = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@contextmanager
def fleet_with_keys(certs: Path, directory: Path) -> Iterator[Keyed]:
    """Queue, scheduler, worker and gateway with mutual TLS, keys of two tenants, and a service that has a key only."""
    keyfile = Keyfile(directory / "keys.toml")
    keyfile.head += "\n[tenants.small]\nmax_waiting_requests = 2\nmax_waiting_bytes = 1000\n\n"
    keyfile.put("acme", 'role = "client"\ntenant = "acme"')
    keyfile.put("acme-batch", 'role = "client"\ntenant = "acme"\nchannels = ["batch"]')
    keyfile.put("beta", 'role = "client"\ntenant = "beta"')
    keyfile.put("small", 'role = "client"\ntenant = "small"')
    keyfile.put("ops", 'role = "operator"')
    keyfile.put("worker", 'role = "service"')
    keyfile.put("gone", 'role = "client"\ntenant = "acme"\nrevoked = true')
    keyfile.put("old", 'role = "client"\ntenant = "acme"\nexpires = 2020-01-01T00:00:00Z')
    keyfile.write()
    issued(certs, "client")
    traces = RawReceiver()
    with traces:
        service = {**variables(issued(certs, "service", hosts=LOCAL)), "PENSTOCK_KEYS": str(keyfile.path)}
        fleet = Fleet(directory, {**service, **traces.environment}, queue_flags=["--log-level", "debug"])
        keyed = Keyed(fleet, keyfile, certs, traces)
        try:
            fleet.start_core()
            # One service proves what it is with a key, the others with the certificate that the file names.
            fleet.environment |= {**variables(keyed.files), "PENSTOCK_KEY": keyfile.keys["worker"]}
            fleet.add_worker("w1", SIMULATED_FLAGS)
            fleet.environment |= {**service, "PENSTOCK_KEY": ""}
            addresses = ["--queue-address", fleet.queue.address, "--scheduler-address", fleet.scheduler.address]
            fleet.add("gateway", [*addresses, "--log-level", "debug"]).start()
            yield keyed
        finally:
            fleet.close()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with fleet_with_keys(tmp_path_factory.mktemp("certs"), tmp_path_factory.mktemp("keyed")) as made:
        yield made


def submit(**fields: Any) -> Callable[[Any], Awaitable[Any]]:
    request = queue_pb2.SubmitUnaryRequest(
        requests=[request_pb2.Request(text=PROMPT, sampling=request_pb2.SamplingParams(max_tokens=4), **fields)]
    )
    return lambda channel: queue_pb2_grpc.QueueServiceStub(channel).SubmitUnary(request)


def call(method: str, request: Any) -> Callable[[Any], Awaitable[Any]]:
    """Return a call of a method of either service of the queue."""

    async def made(channel: Any) -> Any:
        for stub in (queue_pb2_grpc.QueueServiceStub(channel), files_pb2_grpc.FilesServiceStub(channel)):
            if hasattr(stub, method):
                answer = getattr(stub, method)(request)
                return [item async for item in answer] if hasattr(answer, "__aiter__") else await answer
        raise AssertionError(method)

    return made


def stream(method: str, opening: Any) -> Callable[[Any], Awaitable[Any]]:
    """Return the opening of a service's stream."""

    async def made(channel: Any) -> None:
        answer = getattr(queue_pb2_grpc.QueueServiceStub(channel), method)()
        await answer.write(opening)
        assert await answer.read() is not grpc.aio.EOF
        answer.cancel()

    return made


STATS = call("Stats", queue_pb2.StatsRequest())
LIST_DEAD = call("ListDead", queue_pb2.ListDeadRequest())
REQUEUE = call("RequeueDead", queue_pb2.RequeueDeadRequest(all=True))
BACKUP = call("Backup", queue_pb2.BackupRequest(name="x"))
EVIL = queue_pb2.WorkOpen(worker_id="evil", instance_id="1")
WORK = stream("Work", queue_pb2.WorkRequest(messages=[queue_pb2.WorkerToQueue(open=EVIL)]))
OPEN = queue_pb2.SchedulerToQueue(open=queue_pb2.BacklogOpen(name="evil"))
BACKLOG = stream("Backlog", queue_pb2.BacklogRequest(messages=[OPEN]))
RECORDS = call("ListRecords", files_pb2.ListRecordsRequest(kind="batch"))
RECORD = files_pb2.Record(kind="batch", record_id="b")
PUT = call("PutRecords", files_pb2.PutRecordsRequest(puts=[files_pb2.PutRecord(record=RECORD)]))

TABLE = [
    ("no key", "", submit(), UNAUTHENTICATED),
    ("no key, counts", "", STATS, UNAUTHENTICATED),
    ("no key, a worker's stream", "", WORK, UNAUTHENTICATED),
    ("a wrong key", "penstock.acme.wrong", submit(), UNAUTHENTICATED),
    ("a key of nobody", "penstock.nobody.wrong", submit(), UNAUTHENTICATED),
    ("no key at all", "nonsense", submit(), UNAUTHENTICATED),
    ("a revoked key", "gone", submit(), UNAUTHENTICATED),
    ("an expired key", "old", submit(), UNAUTHENTICATED),
    ("a good key", "acme", submit(), None),
    ("no right for the channel", "acme-batch", submit(channel="interactive"), DENIED),
    ("the right for the channel", "acme-batch", submit(channel="batch"), None),
    ("another tenant named", "acme", submit(tenant="beta"), grpc.StatusCode.INVALID_ARGUMENT),
    ("a client, dead letters", "acme", LIST_DEAD, DENIED),
    ("a client, requeue", "acme", REQUEUE, DENIED),
    ("a client, backup", "acme", BACKUP, DENIED),
    ("a client, a worker's stream", "acme", WORK, DENIED),
    ("a client, the scheduler's stream", "acme", BACKLOG, DENIED),
    ("a client, batch records", "acme", RECORDS, DENIED),
    ("a client, a batch record of its own", "acme", PUT, DENIED),
    ("an operator, a worker's stream", "ops", WORK, DENIED),
    ("an operator, dead letters", "ops", LIST_DEAD, None),
    ("an operator, requeue", "ops", REQUEUE, None),
    ("a service for no tenant", "worker", submit(), DENIED),
    ("a service, requeue", "worker", REQUEUE, DENIED),
    ("a service, records", "worker", RECORDS, None),
]


@pytest.mark.parametrize(("name", "made", "wanted"), [case[1:] for case in TABLE], ids=[case[0] for case in TABLE])
async def test_who_may_do_what(keyed: Keyed, name: str, made: Any, wanted: Any) -> None:
    assert await keyed.status(name, made) is wanted


@pytest.mark.parametrize("who", ["plain text", "no certificate", "another CA's", "expired"])
async def test_a_good_key_does_not_replace_a_certificate(keyed: Keyed, tmp_path: Path, who: str) -> None:
    """The handshake fails, which gRPC tells as UNAVAILABLE."""
    other = issued(tmp_path, "client")
    files = {
        "plain text": TlsFiles(),
        "no certificate": TlsFiles(keyed.files.ca),
        "another CA's": TlsFiles(keyed.files.ca, other.cert, other.key),
        "expired": issued(keyed.certs, "expired", days=0),
    }[who]
    assert await keyed.status("acme", submit(), files) is UNAVAILABLE


async def test_a_certificate_of_a_service_is_a_service_unless_the_call_is_somebody_elses(keyed: Keyed) -> None:
    service = TlsFiles(keyed.files.ca, str(keyed.certs / "service.pem"), str(keyed.certs / "service-key.pem"))
    assert await keyed.status("", RECORDS, service) is None
    assert await keyed.status("", REQUEUE, service) is DENIED
    assert await keyed.status("acme", RECORDS, service) is DENIED
    assert await keyed.status("nonsense", RECORDS, service) is UNAUTHENTICATED


async def test_a_files_name_tells_another_tenant_nothing(keyed: Keyed) -> None:
    """In whatever state the file is, and whatever is done with its name, the answer is the one."""
    begin = call("CreateFile", files_pb2.CreateFileRequest(file_id="mine"))
    append = call("AppendFile", files_pb2.AppendFileRequest(file_id="mine", data=b"x"))
    close = call("CloseFile", files_pb2.CloseFileRequest(file_id="mine", bytes=1))
    for own in (begin, append, close):
        assert await keyed.status("acme", own) is None
        for foreign in (begin, append, close, call("GetFile", files_pb2.GetFileRequest(file_id="mine"))):
            assert await keyed.status("beta", foreign) is NOT_FOUND
    assert await keyed.status("acme", begin) is grpc.StatusCode.ALREADY_EXISTS
    assert await keyed.status("acme", call("DeleteFile", files_pb2.DeleteFileRequest(file_id="mine"))) is None
    assert await keyed.status("beta", begin) is None


async def test_the_scheduler_asks_for_keys_too(keyed: Keyed) -> None:
    async def status(name: str, method: str, request: Any) -> Any:
        credentials = Credentials(keyed.key(name)) if name else None
        async with open_channel(keyed.fleet.scheduler.address, [], keyed.files, credentials) as channel:
            try:
                await getattr(scheduler_pb2_grpc.SchedulerServiceStub(channel), method)(request)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return None

    assert await status("", "Status", scheduler_pb2.StatusRequest()) is UNAUTHENTICATED
    assert await status("acme", "Status", scheduler_pb2.StatusRequest()) is DENIED
    assert await status("acme", "Status", scheduler_pb2.StatusRequest(names_only=True)) is None
    assert await status("ops", "Status", scheduler_pb2.StatusRequest()) is None
    assert await status("worker", "DrainWorker", scheduler_pb2.DrainWorkerRequest(worker_id="w1")) is DENIED
    assert await status("ops", "DrainWorker", scheduler_pb2.DrainWorkerRequest(worker_id="none")) is NOT_FOUND


async def followed(keyed: Keyed, name: str, request_id: str) -> list[str]:
    """Follow a request with a key; return the names that are unknown to it."""
    credentials = Credentials(keyed.key(name))
    follow = [queue_pb2.FollowedRequest(request_id=request_id, tokens=True)]
    async with open_channel(keyed.fleet.queue.address, [], keyed.files, credentials) as channel:
        told = queue_pb2_grpc.QueueServiceStub(channel).Follow()
        await told.write(queue_pb2.FollowRequest(follow=follow))
        await told.done_writing()
        answers = [answer async for answer in told]
    events = [event for answer in answers for event in answer.events]
    unknown = [name for answer in answers for name in answer.unknown]
    assert bool(events) is not bool(unknown)
    return unknown


async def test_a_tenant_finds_nothing_of_another(keyed: Keyed) -> None:
    async with keyed.client("acme") as acme, keyed.client("beta") as beta, keyed.client("ops") as ops:
        mine = {"prompt": PROMPT, "max_tokens": 4, "batch": "b", "idempotency_key": "k"}
        name = await acme.submit(**mine)  # type: ignore[arg-type]
        result = await acme.result(name)
        assert result.outcome is public.Outcome.COMPLETED
        await ops.drain_worker("w1")
        waiting = await acme.submit(prompt=PROMPT, max_tokens=4, batch="b")
        for request_id in (name, waiting):
            with pytest.raises(public.NotFound):
                await beta.get(request_id)
            with pytest.raises(public.NotFound):
                await beta.result(request_id)
            assert (await beta.cancel(request_id)).not_cancelled == (request_id,)
            assert await beta.delete(request_id) == 0
            assert await followed(keyed, "beta", request_id) == [request_id]
        assert await followed(keyed, "acme", name) == []
        with pytest.raises(public.NotFound):
            await beta.get(idempotency_key="k")
        with pytest.raises(public.NotFound):
            await beta.get(idempotency_key="k", tenant="acme")
        with pytest.raises(public.NotFound):  # a batch of the same name is another one
            await anext(beta.watch(batch="b"))
        assert (await beta.cancel(batch="b")).cancelled == 0
        assert await beta.delete(batch="b") == 0
        assert (await acme.cancel(waiting)).cancelled == 1
        await ops.undrain_worker("w1")
        other = await beta.submit(**mine)  # type: ignore[arg-type]
        assert other != name, "the idempotency key is the tenant's own"
        assert (await beta.result(other)).request_id == other
        assert (await acme.get(name)).request_id == name
        assert (await ops.get(name)).request_id == name
        stats = await beta.stats()
        assert {channel.channel for channel in stats.channels} == {"interactive", "batch"}
        assert not any(channel.accepted or channel.ready or channel.leased for channel in stats.channels)
        assert stats.names_only
        assert [found.request_id async for found in acme.watch(batch="b")] == [name, waiting]


def lines(count: int) -> bytes:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    asked = ({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(count))
    return "".join(json.dumps(line) + "\n" for line in asked).encode()


def upload(keyed: Keyed, name: str, content: bytes) -> tuple[int, Any, Any]:
    parts = [b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts += [b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n', content, b"\r\n--x--\r\n"]
    kind = "multipart/form-data; boundary=x"
    return keyed.http(name, "POST", "/v1/files", b"".join(parts), content_type=kind)


COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}


def test_over_http_it_is_the_same(keyed: Keyed) -> None:
    for name, status, code in (
        ("", 401, "invalid_api_key"),
        ("nonsense", 401, "invalid_api_key"),
        ("gone", 401, "invalid_api_key"),
        ("old", 401, "invalid_api_key"),
        ("worker", 403, "permission_denied"),
        ("acme-batch", 403, "permission_denied"),
    ):
        for path, body in (("/v1/completions", COMPLETION), ("/v1/models", None)):
            if name == "acme-batch" and body is None:
                continue
            found, answer, _ = keyed.http(name, "GET" if body is None else "POST", path, body)
            assert (found, answer["error"]["code"]) == (status, code), (name, path)
            assert answer["error"]["param"] == ("x-penstock-channel" if name == "acme-batch" else None)
    served = keyed.http("acme", "GET", "/v1/models")[1]["data"]
    assert [model["id"] for model in served] == ["tiny"], "which the scheduler tells the gateway and not its clients"
    status, _, _ = keyed.http("acme-batch", "POST", "/v1/completions", COMPLETION, x_penstock_channel="batch")
    assert status == 200
    status, answer, headers = keyed.http("acme", "POST", "/v1/completions", COMPLETION)
    assert status == 200, answer
    # At once: the gateway follows the requests of both over one stream, which is neither's.
    assert keyed.http("beta", "POST", "/v1/completions", COMPLETION)[0] == 200
    path = f"/v1/requests/{headers['x-request-id']}"
    assert keyed.http("acme", "GET", path)[1]["status"] == "completed"
    for method in ("GET", "DELETE"):
        assert keyed.http("beta", method, path)[0] == 404
        assert keyed.http("", method, path)[0] == 401
    assert keyed.http("", "GET", "/health")[0] == 200
    assert keyed.http("", "GET", "/metrics")[0] == 200


def test_files_and_batches_are_their_tenants(keyed: Keyed) -> None:
    assert upload(keyed, "", lines(1))[0] == 401
    status, file, _ = upload(keyed, "acme", lines(3))
    assert status == 200, file
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert keyed.http("", "POST", "/v1/batches", asked)[0] == 401
    assert keyed.http("beta", "POST", "/v1/batches", asked)[0] == 400, "there is no such file for it"
    wrong = keyed.http("acme-batch", "POST", "/v1/batches", asked, x_penstock_channel="interactive")
    assert (wrong[0], wrong[1]["error"]["code"]) == (403, "permission_denied")
    status, batch, _ = keyed.http("acme", "POST", "/v1/batches", asked)
    assert status == 200, batch
    path = f"/v1/batches/{batch['id']}"
    wait_for(lambda: keyed.http("acme", "GET", path)[1]["status"] == "completed", "the batch to end", PATIENCE_S)
    done = keyed.http("acme", "GET", path)[1]
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    output = f"/v1/files/{done['output_file_id']}"
    content = keyed.http("acme", "GET", f"{output}/content")[1]
    assert len(content.splitlines()) == 3
    assert keyed.http("ops", "GET", f"{output}/content?order=input")[1].count(b"\n") == 3
    mine = f"/v1/files/{file['id']}"
    for method, of_acme in (
        ("GET", path), ("POST", f"{path}/cancel"), ("GET", mine), ("GET", f"{mine}/content"), ("GET", output),
        ("GET", f"{output}/content"), ("DELETE", output), ("DELETE", mine),
    ):  # fmt: skip
        assert keyed.http("beta", method, of_acme)[0] == 404, of_acme
        assert keyed.http("", method, of_acme)[0] == 401, of_acme
    for listed in ("/v1/files", "/v1/batches"):
        assert keyed.http("beta", "GET", listed)[1]["data"] == []
        assert len(keyed.http("acme", "GET", listed)[1]["data"]) > 0
    assert keyed.http("acme", "DELETE", output)[1]["deleted"]
    assert keyed.http("acme", "DELETE", mine)[1]["deleted"]


def test_the_console_is_an_operators(keyed: Keyed) -> None:
    def basic(name: str) -> str:
        return "Basic " + base64.b64encode(f"me:{keyed.key(name)}".encode()).decode()

    status, _, headers = keyed.http("", "GET", "/")
    assert (status, headers["www-authenticate"].split()[0]) == (401, "Basic")
    assert keyed.http("", "GET", "/console/state", authorization=basic("acme"))[0] == 403
    assert keyed.http("", "GET", "/", authorization=basic("ops"))[0] == 200
    state = keyed.http("", "GET", "/console/state", authorization=basic("ops"))[1]
    assert [worker["name"] for worker in state["workers"]] == ["w1"]
    assert state["channels"]
    assert keyed.http("ops", "GET", "/console/state")[0] == 200
    gateway = keyed.fleet.services["gateway"].address
    drain = ("POST", "/console/drain", {"worker": "w1"})
    for asked in (("GET", "/console/state"), drain):
        status, _, headers = keyed.http("", *asked, origin=f"https://{gateway}")
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), "a browser would ask on the script's time"
    assert keyed.http("", "GET", "/v1/models", authorization=basic("ops"))[0] == 401, "browsers send it unasked"


def test_a_console_whose_queue_is_away_says_so_and_comes_back(keyed: Keyed) -> None:
    """The page is there, though nobody can be told from anybody: it has nothing to tell but that."""
    keyed.fleet.queue.kill()
    try:
        for path in ("/", "/console/console.js"):
            assert keyed.http("", "GET", path)[0] == 200
        gateway = keyed.fleet.services["gateway"].address
        drain = ("POST", "/console/drain", {"worker": "w1"})
        for name in ("ops", ""):
            for asked in (("GET", "/console/state"), drain):
                status, answer, _ = keyed.http(name, *asked, origin=f"https://{gateway}")
                assert (status, answer["error"]["code"]) == (503, "queue_unavailable")
                assert answer["error"]["message"].startswith("the queue does not answer")
    finally:
        keyed.fleet.queue.start()
    wait_for(lambda: keyed.http("", "GET", "/console/state")[0] == 401, "the console to ask for a key", PATIENCE_S)
    assert keyed.http("", "GET", "/")[0] == 401
    assert keyed.http("ops", "GET", "/console/state")[0] == 200


async def test_a_quota_is_told_by_name_and_touches_nobody_else(keyed: Keyed) -> None:
    async with keyed.client("small") as small, keyed.client("ops") as ops:
        await ops.drain_worker("w1")
        try:
            names = [await small.submit(prompt="a", max_tokens=4) for _ in range(2)]
            with pytest.raises(public.QuotaExceeded, match="max_waiting_requests of tenant small is 2; 2 wait"):
                await small.submit(prompt="a", max_tokens=4)
            acks = [ack async for ack in small.submit_many([{"prompt": "a"}])]
            assert [ack.error.code for ack in acks if ack.error] == ["insufficient_quota"]
            status, answer, _ = await asyncio.to_thread(keyed.http, "small", "POST", "/v1/completions", COMPLETION)
            assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
            await small.cancel(names[0])
            with pytest.raises(public.QuotaExceeded, match="max_waiting_bytes of tenant small is 1000; "):
                await small.submit(prompt="a" * 860, max_tokens=4)
            # No waiting would let that in, whichever way it comes.
            too_large = "max_waiting_bytes of tenant small is 1000; [0-9]+ were sent at once"
            with pytest.raises(public.InvalidRequest, match=too_large) as refused:
                await small.submit(prompt="a" * 1000, max_tokens=4)
            assert refused.value.code == "larger_than_quota"
            with pytest.raises(public.InvalidRequest, match=too_large) as refused:
                await small.submit(prompt="a" * (TARGET_FRAME_BYTES + 1), max_tokens=4)
            assert refused.value.code == "larger_than_quota"
            never = [ack async for ack in small.submit_many([{"prompt": "a" * 1000}], wait_for_quota=True)]
            assert [ack.error.code for ack in never if ack.error] == ["larger_than_quota"]
            big = {**COMPLETION, "prompt": "a" * 1000}
            status, answer, _ = await asyncio.to_thread(keyed.http, "small", "POST", "/v1/completions", big)
            assert (status, answer["error"]["code"]) == (400, "larger_than_quota")
            assert await keyed.status("acme", submit()) is None
        finally:
            await ops.undrain_worker("w1")
        assert (await small.result(names[1])).outcome is public.Outcome.COMPLETED


async def test_a_damaged_file_changes_nothing(keyed: Keyed) -> None:
    good = keyed.keyfile.path.read_text()
    keyed.keyfile.path.write_text(good + "\n[keys.")
    try:
        await wait_for_async(
            lambda: asyncio.to_thread(lambda: "the keys stay as they were" in keyed.fleet.queue.log()),
            "the queue to tell", PATIENCE_S,
        )  # fmt: skip
        assert await keyed.status("acme", submit()) is None
        assert await keyed.status("gone", submit()) is UNAUTHENTICATED
    finally:
        keyed.keyfile.write()


def defects(log: str) -> list[str]:
    """Return the records with stack traces, except for those that gRPC logs to debug itself: a stream ended early."""
    records = re.split(r"^(?=\d{4}-\d\d-\d\d )", log, flags=re.MULTILINE)
    return [record for record in records if "Traceback" in record and " DEBUG grpc." not in record.partition("\n")[0]]


def test_what_must_not_be_written_is_not(keyed: Keyed) -> None:
    """Last with this fleet: everything before it has been logged by now, at the finest level, and traced."""
    secrets = [PROMPT, *(key.rpartition(".")[2] for key in keyed.keyfile.keys.values())]
    names = {"gateway.request", "queue.persist", "queue.complete", "scheduler.grant", "worker.complete"}
    wait_for(lambda: names <= {span.name for span in keyed.traces.spans}, "the traces", PATIENCE_S)
    exported = b"".join(keyed.traces.exports)
    for secret in secrets:
        assert secret.encode() not in exported
        for service in keyed.fleet.services.values():
            assert secret not in service.log()
    assert [said for service in keyed.fleet.services.values() for said in defects(service.log())] == []
