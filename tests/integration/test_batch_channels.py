"""Batches for which nobody names a channel, in a fleet that has none called `batch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import SIMULATED_FLAGS
from tests.integration.test_gateway_batches import begin, client_of, completions, ended, jsonl
from tests.support.fleet import Fleet, penstock, write_jsonl

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CHANNELS = {
    "PENSTOCK_CHANNELS": json.dumps({"gold": {}, "bulk": {}}),
    "PENSTOCK_QUEUE_DEFAULT_CHANNEL": "gold",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("channels"), CHANNELS)
    try:
        fleet.start_core()
        fleet.add_worker("w1", SIMULATED_FLAGS)
        fleet.add_gateway()
        yield fleet
    finally:
        fleet.close()


def test_a_batch_of_the_gateway_goes_to_the_default_channel(fleet: Fleet) -> None:
    client = client_of(fleet.services["gateway"])
    batch = ended(client, begin(client, jsonl(completions(2, max_tokens=2))).id)
    assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 2)
    with pytest.raises(openai.BadRequestError, match="x-penstock-channel: 'batch' is unknown; known: bulk, gold"):
        begin(client, jsonl(completions(1)), extra_headers={"x-penstock-channel": "batch"})


def test_a_batch_file_goes_to_the_default_channel(fleet: Fleet, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", completions(2, max_tokens=2))
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    command += ["--queue", fleet.queue.address, "--scheduler", fleet.scheduler.address]
    named = penstock(*command, "--channel", "batch")
    assert (named.returncode, "channel: 'batch' is unknown; known: bulk, gold" in named.stderr) == (2, True)
    ran = penstock(*command)
    assert ran.returncode == 0, ran.stderr
    answers: list[Any] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["error"] for answer in answers] == [None, None]
