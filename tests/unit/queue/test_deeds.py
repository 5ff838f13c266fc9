"""What operators do leaves a record: what, how many, and by whose key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from penstock.keys import Role, digest, new_key
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.auth.caller import CALLER, Caller
from services.queue import deeds
from services.telemetry import Telemetry
from tests.support.serving import Peer, ids, serving, text

ROLES = {"ops": ("operator", "admins"), "ci": ("client", "acme"), "fleet": ("service", "default")}
KEYS = {name: new_key(name) for name in ROLES}
ACME = ("x-penstock-tenant", "acme")


def of(name: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the metadata of a caller's calls."""
    return [("authorization", f"Bearer {KEYS[name]}"), *more]


@pytest.fixture
async def peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Peer]:
    caplog.set_level(logging.DEBUG, deeds.log.name)
    tables = [
        f'[keys.{name}]\nrole = "{role}"\ntenant = "{tenant}"\nsha256 = "{digest(KEYS[name]).hex()}"\n'
        for name, (role, tenant) in ROLES.items()
    ]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(tables).replace('tenant = "default"\n', ""))
    async with serving(Telemetry(None), keys=path) as found:
        yield found


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """Return what was noted at a level since the last look."""
    lines = [
        record.getMessage() for record in caplog.records if (record.name, record.levelno) == (deeds.log.name, level)
    ]
    assert not any(key.split(".")[-1] in line for key in KEYS.values() for line in lines)
    caplog.clear()
    return lines


async def submitted(peer: Peer, name: str, *requests: request_pb2.Request) -> list[str]:
    """Return the names of requests that were submitted by a key."""
    response = await peer.stub.SubmitUnary(queue_pb2.SubmitUnaryRequest(requests=requests), metadata=of(name))
    return [ack.request_id for ack in response.acks]


async def test_an_operators_cancels_deletes_and_requeues_are_told_once_for_each_call(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    one, *more = await submitted(peer, "ci", *(text() for _ in range(4)))
    await submitted(peer, "ops", text(batch="night"), text(batch="night"))
    assert not said(caplog)
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(one)), metadata=of("ops"))
    (record,) = [record for record in caplog.records if record.name == deeds.log.name]
    assert record.__dict__["request_id"] == one
    who = "(key ops, operator, tenant admins)"
    ended = "ended, 0 told to stop, 0 not to be cancelled"
    assert said(caplog) == [f"cancelled request '{one}': 1 {ended} {who}"]
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(*more)), metadata=of("ops"))
    assert said(caplog) == [f"cancelled 3 requests by name: 3 {ended} {who}"]
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="night"), metadata=of("ops"))
    assert said(caplog) == [f"cancelled batch 'night': 2 {ended} {who}"]
    await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(*more)), metadata=of("ops"))
    assert said(caplog) == [f"deleted the results of 3 requests by name: 3 {who}"]
    await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(all=True), metadata=of("ops"))
    assert said(caplog) == [f"requeued all dead letters: 0 are back in line, 0 were none {who}"]
    await peer.stub.RequeueDead(queue_pb2.RequeueDeadRequest(request_ids=ids("x\ny")), metadata=of("ops"))
    assert said(caplog) == [rf"requeued request 'x\ny': 0 are back in line, 1 were none {who}"]


async def test_what_clients_and_services_do_with_their_own_fills_no_log(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = await submitted(peer, "ci", text(), text())
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(one)), metadata=of("ci"))
    await peer.stub.Cancel(queue_pb2.CancelRequest(request_ids=ids(other)), metadata=of("fleet", ACME))
    await peer.stub.Cancel(queue_pb2.CancelRequest(batch="night"), metadata=of("ci"))
    await peer.stub.Delete(queue_pb2.DeleteRequest(request_ids=ids(one)), metadata=of("ci"))
    records = list(caplog.records)
    assert not said(caplog)
    caplog.records.extend(records)
    lines = said(caplog, logging.DEBUG)
    assert [line.rpartition(" (")[2] for line in lines] == [
        "key ci, client, tenant acme)",
        "key fleet, service, tenant acme)",
        "key ci, client, tenant acme)",
        "key ci, client, tenant acme)",
    ]


@pytest.mark.parametrize(
    ("request_", "subject"),
    [
        (queue_pb2.CancelRequest(batch="night"), "Cancel of batch 'night'"),
        (queue_pb2.DeleteRequest(request_ids=ids("r-1", "r-2")), "Delete of 2 requests by name"),
        (queue_pb2.RequeueDeadRequest(all=True), "RequeueDead of all dead letters"),
    ],
)
def test_a_call_that_its_caller_leaves_is_told_as_that(
    request_: deeds.Request, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, deeds.log.name)
    with pytest.raises(asyncio.CancelledError), deeds.until_cut_short(request_):
        raise asyncio.CancelledError
    (line,) = said(caplog)
    assert line.startswith(f"{subject}: its caller left before it was over")
    with deeds.until_cut_short(request_):
        pass
    assert not said(caplog)


@pytest.mark.parametrize(
    ("caller", "who"),
    [
        (Caller(), "no keys, tenant default"),
        (Caller(Role.OPERATOR, "t", key_id="ops"), "key ops, operator, tenant t"),
        (Caller(Role.SERVICE, "t", "t"), "a certificate, service, tenant t"),
    ],
)
async def test_a_backup_is_told_of_whoever_makes_it(caller: Caller, who: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, deeds.log.name)
    CALLER.set(caller)
    deeds.backed_up(queue_pb2.BackupResponse(path="/backups/b1", waiting=3, results=5))
    assert said(caplog) == [f"made a backup at /backups/b1: 3 requests wait in it, 5 have results ({who})"]


def levels(names: Sequence[str], batch: str, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the levels of what is said of a cancel."""
    subject = queue_pb2.CancelRequest(batch=batch) if batch else queue_pb2.CancelRequest(request_ids=ids(*names))
    caplog.clear()
    deeds.cancelled(subject, queue_pb2.CancelResponse(cancelled=1))
    return [record.levelno for record in caplog.records]


async def test_without_keys_only_the_cancel_of_a_batch_is_no_clients(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, deeds.log.name)
    CALLER.set(Caller())
    assert levels(["r-1"], "", caplog) == [logging.DEBUG]
    assert levels([], "night", caplog) == [logging.INFO]
