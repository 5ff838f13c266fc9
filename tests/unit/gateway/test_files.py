"""Output and error files are views of a batch: what becomes of them when it is forgotten."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from penstock.credentials import acting_for
from penstock.errors import PenstockError, Unauthenticated
from penstock.files.v1 import files_pb2
from penstock.queue.v1 import queue_pb2
from services.gateway.app import _penstock, _problem
from services.gateway.batch.output import Output
from services.gateway.batch.records import BATCHES, DamagedError, new_batch_id
from services.gateway.batches import BATCHES_URL, Batches
from services.gateway.core.batch import Status
from services.gateway.doorman import Doorman
from services.gateway.files import FILES_URL, Files
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import Pages
from services.gateway.problem import Problem
from services.gateway.vigil import Vigil
from tests.support.asgi import get, post
from tests.unit.gateway.test_drive import URL, Rig, rig

__all__ = ["rig"]


def app_of(rig: Rig, doorman: Doorman | None = None, pages: Pages | None = None) -> Starlette:
    metrics = GatewayMetrics(CollectorRegistry())
    output, doorman = Output(rig.client, rig.shelf), doorman or Doorman()
    pages = pages or Pages()
    files = Files(rig.shelf, rig.records, output, pages, metrics, Vigil(), doorman, 2**20, 5.0)
    batches = Batches(rig.client, rig.shelf, rig.records, output, Intake(1.0), pages, Vigil(), Doorman(), lambda: None)
    return Starlette(
        routes=[*files.routes(), *batches.routes()],
        exception_handlers={Problem: _problem, PenstockError: _penstock},
    )


async def test_a_view_is_kept_no_longer_than_its_batch(rig: Rig) -> None:
    for kept_s in (0, 3600):
        batch = await rig.batch(expires_at=int(time.time()) - 1, output_expires_after_s=kept_s)
        await rig.drive(await rig.take(batch, "me")).run()
        done, _ = await rig.records.get(batch.batch_id)
        view = await rig.shelf.file(str(done.error_file_id))
        record = await rig.shelf.record(BATCHES, batch.batch_id)
        assert 0 < view.expires_unix_ns <= record.expires_unix_ns + 10**9, "records expire at whole seconds"
        if kept_s:
            assert view.expires_unix_ns == view.created_unix_ns + kept_s * 10**9
        await rig.shelf.delete("file-1")


async def test_a_view_whose_batch_is_gone_can_be_deleted(rig: Rig) -> None:
    view = files_pb2.CreateFileRequest(file_id="file-1-output", view=new_batch_id(), purpose="batch_output", bytes=7)
    await rig.shelf.put_view(view)
    app = app_of(rig)
    assert (await get(app, f"{FILES_URL}/file-1-output/content").whole()).status == 404
    deleted = await get(app, f"{FILES_URL}/file-1-output", method="DELETE").whole()
    assert deleted.json() == {"id": "file-1-output", "object": "file", "deleted": True}
    assert (await get(app, FILES_URL).whole()).json()["data"] == []


async def test_a_file_of_another_tenant_is_no_input_also_for_who_sees_it(rig: Rig) -> None:
    """An operator sees everybody's files; the lines of a batch are read for the tenant whose batch it is."""
    with acting_for("other"):
        batch = await rig.batch()
    body = {"input_file_id": batch.input_file_id, "endpoint": URL, "completion_window": "24h"}
    answer = await post(app_of(rig), BATCHES_URL, body).whole()
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input_file_id")


async def test_a_view_of_a_batch_whose_record_is_damaged_says_so_and_can_be_deleted(rig: Rig) -> None:
    record = files_pb2.Record(kind=BATCHES, record_id="batch_f", value=b"{torn")
    await rig.shelf.put([files_pb2.PutRecord(record=record)])
    view = files_pb2.CreateFileRequest(file_id="file-f-output", view="batch_f", purpose="batch_output", bytes=7)
    await rig.shelf.put_view(view)
    app = app_of(rig)
    found = await get(app, f"{FILES_URL}/file-f-output/content").whole()
    assert (found.status, found.json()["error"]["code"]) == (500, "damaged_record")
    deleted = await get(app, f"{FILES_URL}/file-f-output", method="DELETE").whole()
    assert deleted.status == 200


async def test_a_damaged_batch_is_named_among_the_others(rig: Rig) -> None:
    record = files_pb2.Record(kind=BATCHES, record_id="batch_f", value=b"{torn")
    await rig.shelf.put([files_pb2.PutRecord(record=record)])
    good = await rig.batch()
    listed, more = await rig.records.page("", 10)
    assert ([batch.batch_id for batch in listed], more) == (["batch_f", good.batch_id], False)
    assert (listed[0].status, listed[0].errors[0].code) == (Status.FAILED, "damaged_record")
    with pytest.raises(DamagedError):
        await rig.records.get("batch_f")
    app = app_of(rig)
    found = await get(app, f"{BATCHES_URL}/batch_f").whole()
    assert (found.status, found.json()["errors"]["data"][0]["code"]) == (200, "damaged_record")
    assert (await post(app, f"{BATCHES_URL}/batch_f/cancel", {}).whole()).status == 409
    assert (await get(app, BATCHES_URL).whole()).json()["first_id"] == "batch_f"


class NoKey(Doorman):
    """Lets nobody in."""

    async def tenant_client(self) -> queue_pb2.IdentifyResponse:
        """Refuse."""
        raise Unauthenticated("no key")


async def test_of_an_upload_without_a_key_nothing_is_read(rig: Rig) -> None:
    visit = post(app_of(rig, NoKey()), FILES_URL, b"--edge", content_type="multipart/form-data; boundary=edge")
    assert (await visit.whole()).status == 401
    assert visit._inbox.qsize() == 1
