"""A proxy that the environment names for other traffic is not asked for clients' and services' own connections."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock import connection
from penstock.queue.v1 import queue_pb2, queue_pb2_grpc
from penstock.tls import Access
from services.rpc import limits
from services.telemetry import Telemetry
from tests.support.memory_store import MemoryStore
from tests.support.serving import serving

NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize("options", [limits.CHANNEL_OPTIONS, connection.CHANNEL_OPTIONS], ids=["services", "clients"])
async def test_no_proxy_is_asked(options: Sequence[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Telemetry(None), MemoryStore()) as peer:
        for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(variable, NOBODY)
        async with Access().open(f"127.0.0.1:{peer.port}", options) as channel:
            await queue_pb2_grpc.QueueServiceStub(channel).Stats(queue_pb2.StatsRequest())
