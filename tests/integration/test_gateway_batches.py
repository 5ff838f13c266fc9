"""Files and batches with the `openai` client, on a gateway as a process, simulated engines behind it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_gateway import gateway_of
from tests.support.batch_lines import chat, completion
from tests.support.fleet import Fleet, Service
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

LEASE = ["--batch-lease-s", "0.5"]
LONG = pytest.mark.skipif("GATEWAY_LINES" not in os.environ, reason="`make gateway-kills` runs it")
"""For what smaller tests cover in part, and the default suite has no time for."""

ENDS = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("batches"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", SIMULATED_FLAGS)
        gateway_of(fleet, *LEASE, "--max-file-bytes", "3000000", "--body-timeout-s", "2")
        yield fleet
    finally:
        fleet.close()


def client_of(gateway: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return client_of(fleet.services["gateway"])


def jsonl(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(client: openai.OpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, content), purpose="batch").id


def begin(client: openai.OpenAI, content: bytes, url: str = "/v1/completions", **fields: Any) -> Batch:
    fields = {"completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, content), endpoint=url, **fields)  # type: ignore[arg-type]


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 60) -> Batch:
    def over() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDS else None

    return wait_for(over, f"{batch_id} to end", timeout_s)


def lines_of(client: openai.OpenAI, file_id: str | None, **query: str) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = client.files.content(file_id, extra_query=query).text
    return [json.loads(line) for line in text.splitlines()]


def completions(count: int, **body: Any) -> list[dict[str, Any]]:
    return [completion(f"line-{n}", f"the river {n}", **body) for n in range(count)]


def test_a_file_is_stored_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = b"x" * 2_500_001
    file = client.files.create(
        file=("näme.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "näme.jsonl", "batch", "processed")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    small = upload(client, b"")
    names = [found.id for found in client.files.list(limit=1)]
    assert names[:2] == [small, file.id], "pages follow each other"
    assert next(found.id for found in client.files.list(order="asc", after=file.id)) == small
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_a_batch_is_answered_in_both_orders(client: openai.OpenAI) -> None:
    lines = completions(40)
    lines[7]["body"]["prompt"] = "x" * 5000
    batch = begin(client, jsonl(lines[:20]) + b"\n" + jsonl(lines[20:]).rstrip(), metadata={"mine": "yes"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"mine": "yes"})
    done = ended(client, batch.id)
    assert done.status == "completed", done
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 39, 1)
    assert done.in_progress_at is not None
    assert done.finalizing_at is not None
    assert done.completed_at is not None
    out = lines_of(client, done.output_file_id)
    assert {line["custom_id"] for line in out} == {line["custom_id"] for line in lines} - {"line-7"}
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in out)
    in_order = lines_of(client, done.output_file_id, order="input")
    assert [line["custom_id"] for line in in_order] == [f"line-{n}" for n in range(40) if n != 7]
    assert sorted(map(str, in_order)) == sorted(map(str, out))
    (wrong,) = lines_of(client, done.error_file_id)
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("line-7", 400)
    assert wrong["response"]["body"]["error"]["code"] == "context_length_exceeded"
    for file_id in (done.output_file_id, done.error_file_id):
        assert file_id is not None
        shown = client.files.retrieve(file_id)
        assert shown.purpose == "batch_output"
        assert shown.bytes == len(client.files.content(file_id).content)
    single = client.completions.create(**lines[3]["body"])
    (same,) = (line for line in out if line["custom_id"] == "line-3")
    assert same["response"]["body"]["choices"][0]["text"] == single.choices[0].text
    assert next(found.id for found in client.batches.list(limit=1)) == batch.id
    assert done.output_file_id is not None
    assert client.files.delete(done.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)
    assert len(lines_of(client, done.error_file_id)) == 1, "only the output's results are gone"


async def test_the_async_client_and_chats(fleet: Fleet) -> None:
    address = fleet.services["gateway"].address
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        content = jsonl([chat(f"c{n}", "hello", logprobs=True, top_logprobs=1) for n in range(3)])
        file = await client.files.create(file=io.BytesIO(content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (batch := await client.batches.retrieve(batch.id)).status not in ENDS:
            await asyncio.sleep(0.05)
        assert batch.status == "completed", batch
        assert batch.output_file_id is not None
        out = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert {line["response"]["body"]["object"] for line in out} == {"chat.completion"}
    assert all(line["response"]["body"]["choices"][0]["logprobs"] for line in out), "the shape travels with the line"


BAD_LINES: dict[str, tuple[list[Any], list[tuple[str, int | None]]]] = {
    "empty": ([], [("empty_file", None)]),
    "other endpoint": ([*completions(2), chat("c", "x")], [("mismatched_endpoint", 3)]),
    "repeated": ([*completions(2), *completions(1)], [("duplicate_custom_id", 3)]),
    "two wrong": ([{"custom_id": "a"}, *completions(1), 7], [("missing_field", 1), ("invalid_json_line", 3)]),
    "unknown model": ([completion("a", "x", model="no")], [("model_not_found", 1)]),
    "stream": ([completion("a", "x", stream=True)], [("unsupported_parameter", 1)]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_one_wrong_line_fails_the_batch_and_nothing_is_submitted(
    fleet: Fleet, client: openai.OpenAI, name: str
) -> None:
    lines, expected = BAD_LINES[name]
    if name == "unknown model":
        fleet.wait_settled()
    batch = ended(client, begin(client, jsonl(lines)).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == expected
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_bad_input_is_answered(client: openai.OpenAI) -> None:
    good = {"input_file_id": upload(client, b"x"), "endpoint": "/v1/completions", "completion_window": "24h"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "no/such"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"extra_body": {"shiny": 1}}, "shiny"),
        ({"extra_headers": {"x-penstock-channel": "no"}}, "x-penstock-channel"),
        ({"extra_headers": {"x-penstock-keep": "true"}}, "x-penstock-keep"),
    ]
    for fields, param in bad:
        with pytest.raises(openai.BadRequestError) as error:
            client.batches.create(**{**good, **fields})
        assert error.value.param == param
    wrong_forms: list[tuple[dict[str, Any], str]] = [
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "x"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"extra_body": {"shiny": "1"}}, "shiny"),
    ]
    for fields, param in wrong_forms:
        with pytest.raises(openai.BadRequestError) as error:
            client.files.create(**{"file": b"x", "purpose": "batch", **fields})
        assert error.value.param == param
    with pytest.raises(openai.APIStatusError) as large:
        upload(client, b"x" * 3_100_000)
    assert (large.value.status_code, large.value.code) == (413, "file_too_large")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")
    assert client.batches.list().data is not None


def test_a_batch_that_is_cancelled_sends_the_blocks_home(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.add_worker("w1", [*SIMULATED_FLAGS, "--profile", "cpu-tiny", "--max-num-seqs", "2"])
    client = client_of(gateway_of(fleet, *LEASE))
    lines = [*completions(3, max_tokens=1), *completions(8, max_tokens=2000, ignore_eos=True)]
    for number, line in enumerate(lines):
        line["custom_id"] = f"line-{number}"
    batch = begin(client, jsonl(lines))

    def some_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= 3

    wait_for(some_done, "the short lines to end")
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert done.cancelling_at is not None
    assert done.cancelled_at is not None
    assert done.request_counts is not None
    counts = done.request_counts
    assert counts.completed >= 3
    assert counts.failed >= 1
    out, left = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert (len(out), len(left)) == (counts.completed, counts.failed)
    assert {line["custom_id"] for line in [*out, *left]} == {f"line-{n}" for n in range(11)}
    assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
    assert client.files.delete(batch.input_file_id).deleted
    completed = ended(client, begin(client, jsonl(completions(1))).id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(completed.id)


@LONG
def test_a_batch_whose_window_is_over_expires(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    client = client_of(gateway_of(fleet, *LEASE))
    batch = begin(client, jsonl(completions(5)), completion_window="2s")
    done = ended(client, batch.id)
    assert done.status == "expired"
    assert done.expired_at is not None
    assert done.request_counts is not None
    assert done.request_counts.failed == 5
    errors = lines_of(client, done.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["batch_expired"] * 5
    assert done.output_file_id is None


def test_a_gateway_that_stops_tries_no_longer_than_its_grace_to_give_a_batch_back(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    gateway = gateway_of(fleet, "--shutdown-grace-s", "1", "--queue-patience-s", "600")
    client = client_of(gateway)
    batch_id = begin(client, jsonl(completions(5))).id
    wait_for(lambda: client.batches.retrieve(batch_id).status == "in_progress", "the batch to be driven")
    assert fleet.queue.process is not None
    fleet.queue.process.send_signal(signal.SIGSTOP)  # its kernel takes what is said to it, and nothing answers
    try:
        assert gateway.stop(timeout_s=15.0) == 0
    finally:
        fleet.queue.process.send_signal(signal.SIGCONT)
