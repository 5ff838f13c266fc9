"""While the store cannot write the client says what the queue says: it is there, and no service has to be started."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest

import penstock
from penstock.errors import NobodyAnswers
from penstock.request.v1 import request_pb2
from services.queue.core.effects import Write
from services.queue.storage.store import StoreError
from services.telemetry import Telemetry
from tests.support.serving import serving, text


def fail(_writes: Sequence[Write]) -> None:
    raise StoreError("no medium")


@pytest.mark.parametrize("ask", ["cancel", "delete", "requeue"])
async def test_the_client_says_what_the_queue_says(ask: str) -> None:
    async with serving(Telemetry(None)) as peer, penstock.Client(f"127.0.0.1:{peer.port}", retry_for_s=0) as client:
        waiting, ended, dead = await peer.submit(text(), text(), text())
        await client.cancel(ended)
        work = await peer.work()
        for _ in range(2):
            failure = request_pb2.RequestError(code="e", message="bad")
            await work.complete((await work.claim(dead)).lease, failure=failure)
        name = {"cancel": waiting, "delete": ended, "requeue": dead}[ask]
        with patch.object(peer.service._store, "write", fail), pytest.raises(penstock.Unavailable) as told:
            await getattr(client, ask)(name)
    assert "the queue's store cannot write: no medium" in str(told.value)
    assert not isinstance(told.value, NobodyAnswers)
