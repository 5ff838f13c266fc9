"""`kill -9` of the gateway at every stage of a file and a batch: the state stays whole, each line runs exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as public
from services.gateway.batch.records import BatchRecords
from services.gateway.core.batch import Status
from services.gateway.shelf import Shelf
from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_gateway import gateway_of
from tests.integration.test_gateway_batches import (
    ENDS,
    LEASE,
    LONG,
    begin,
    client_of,
    completions,
    ended,
    jsonl,
    lines_of,
)
from tests.support.fleet import Fleet, Service
from tests.support.waiting import wait_for, wait_for_async
from tests.support.web import asked, connected, head

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LINES = int(os.environ.get("GATEWAY_LINES", "1500"))
"""Of a batch that is killed on its way; `make gateway-kills` has more, so that every stage takes time to be met."""
RECEIVE_BYTES = 64 * 1024
"""What a reader's kernel may hold: of itself it grows to hold a whole file, and a killed gateway has sent all of it."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("kills"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", [*SIMULATED_FLAGS, "--num-gpu-blocks-override", "20001", "--max-num-seqs", "64"])
        gateway_of(fleet, *LEASE)
        yield fleet
    finally:
        fleet.close()


def again(gateway: Service) -> None:
    gateway.kill()
    gateway.start()


async def accepted(fleet: Fleet) -> int:
    """Return how many requests the queue has taken into the batch channel."""
    async with public.Client(fleet.queue.address, fleet.scheduler.address) as client:
        return sum(line.accepted for line in (await client.stats()).channels if line.channel == "batch")


async def killed_before_it_is_read(fleet: Fleet) -> str:
    """Begin batches and kill the gateway, which may have read one by then, until it had not; return that one's name."""
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    async with contextlib.AsyncExitStack() as stack:
        shelf = Shelf(fleet.queue.address, retry_for_s=60.0)
        stack.push_async_callback(shelf.close)
        for _ in range(10):
            batch_id = begin(client, jsonl(completions(LINES, max_tokens=4))).id
            gateway.kill()
            batch, _ = await BatchRecords(shelf).get(batch_id)
            if batch.status is Status.VALIDATING:
                return batch_id
            gateway.start()
            assert ended(client, batch_id, timeout_s=120).status == "completed"
    raise AssertionError("every one of ten batches was read before its gateway was killed")


async def test_a_batch_goes_on_whenever_its_gateway_is_killed(fleet: Fleet) -> None:
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    batch_id = await killed_before_it_is_read(fleet)
    before = await accepted(fleet)
    gateway.start()

    def some_completed() -> bool:
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert counts is not None
        return batch.status in ENDS or counts.completed >= LINES // 10

    async def some_submitted() -> bool:
        return await accepted(fleet) > before + LINES / 10

    await wait_for_async(some_submitted, "lines to be submitted")
    again(gateway)
    wait_for(some_completed, "lines to end")
    again(gateway)
    done = ended(client, batch_id, timeout_s=120)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (LINES, LINES)
    assert await accepted(fleet) == before + LINES, "each line was taken once"
    out = lines_of(client, done.output_file_id)
    assert sorted(line["custom_id"] for line in out) == sorted(f"line-{n}" for n in range(LINES))
    assert client.files.retrieve(str(done.output_file_id)).bytes == len(
        client.files.content(str(done.output_file_id)).content
    )


@LONG
async def test_two_gateways_share_the_batches(fleet: Fleet) -> None:
    other = gateway_of(fleet, *LEASE, name="gateway-other")
    client = client_of(fleet.services["gateway"])
    before = await accepted(fleet)
    ids = [begin(client, jsonl(completions(50, max_tokens=2))).id for _ in range(4)]
    for batch_id in ids:
        done = ended(client_of(other), batch_id)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed) == ("completed", 50)
    assert await accepted(fleet) == before + 200
    assert other.stop() == 0


@LONG
async def test_a_gateway_that_stops_hands_its_batch_to_another(fleet: Fleet) -> None:
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    batch_id = begin(client, jsonl(completions(800, max_tokens=4))).id
    other = gateway_of(fleet, "--batch-lease-s", "60", name="gateway-second")
    assert gateway.stop() == 0
    assert ended(client_of(other), batch_id, timeout_s=30).status == "completed", "sooner than any lease ends"
    assert other.stop() == 0
    gateway.start()


async def test_a_kill_in_an_upload_leaves_no_file(fleet: Fleet) -> None:
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    before = {file.id for file in client.files.list()}
    content = jsonl(completions(40_000))
    form = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    async with connected(gateway.address) as (_, writer):
        writer.write(head("POST", "/v1/files", 2 * len(content), content_type="multipart/form-data; boundary=b"))
        writer.write(form + content)
        await writer.drain()
        again(gateway)
    assert {file.id for file in client.files.list()} == before
    file = client.files.create(file=content, purpose="batch")
    assert client.files.content(file.id).content == content


@LONG
async def test_a_kill_in_a_download_is_noticed_and_the_next_one_is_whole(fleet: Fleet) -> None:
    gateway = fleet.services["gateway"]
    client = client_of(gateway)
    lines: list[dict[str, Any]] = completions(3000, max_tokens=2, echo=True)
    for line in lines:
        line["body"]["prompt"] *= 120
    done = ended(client, begin(client, jsonl(lines)).id, timeout_s=120)
    output = str(done.output_file_id)
    size = client.files.retrieve(output).bytes
    assert size > most_unread_bytes(), "some of it is with the gateway for as long as nobody reads"
    assert await read_until_killed(output, gateway) < size
    gateway.start()
    whole = client.files.content(output).content
    assert {json.loads(line)["custom_id"] for line in whole.splitlines()} == {f"line-{n}" for n in range(len(lines))}


def most_unread_bytes() -> int:
    """Return what two kernels and the stream's own buffer can hold of an answer that nobody reads."""
    send_bytes = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    return send_bytes + 4 * RECEIVE_BYTES  # Linux doubles what it is asked for; a stream reads ahead twice its limit


async def read_until_killed(file_id: str, gateway: Service) -> int:
    """Kill the gateway when the first bytes of a file are there; return how many came before the break was noticed."""
    path = f"/v1/files/{file_id}/content"
    async with asked(gateway.address, "GET", path, receive_bytes=RECEIVE_BYTES) as response:
        parts = response.parts()
        size = len(await anext(parts))
        gateway.kill()
        try:
            async for part in parts:
                size += len(part)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):  # no length of a next chunk is the last
            return size
    raise AssertionError("the end of a broken download looked like an end")
