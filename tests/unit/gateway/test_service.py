"""The gateway as a whole: what it has open when it cannot be served, and when a part of it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.client import Client
from services.gateway import service as gateway
from services.gateway.batch.driver import Driver
from services.gateway.metrics import GatewayMetrics
from services.gateway.service import Service
from services.gateway.settings import GatewaySettings
from services.gateway.shelf import Shelf
from services.telemetry import Telemetry

TIMEOUT_S = 30


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what was closed, in order."""
    found: list[object] = []

    def noting(close: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def noted(self: Any) -> None:
            found.append(self)
            await close(self)

        return noted

    for kind in (Shelf, Client):
        monkeypatch.setattr(kind, "close", noting(kind.close))
    return found


def service() -> Service:
    settings = GatewaySettings(listen="127.0.0.1:0", shutdown_grace_s=1)
    return Service(settings, Telemetry(None), GatewayMetrics(CollectorRegistry()))


@pytest.mark.parametrize(
    ("part", "error"), [("make_server", FileNotFoundError("cert.pem")), ("bind", SystemExit(69))], ids=["files", "port"]
)
async def test_one_that_cannot_be_served_closes_what_it_has_open(
    part: str, error: BaseException, closed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(gateway, part, refuse)
    one = service()
    with pytest.raises(type(error)):
        await one.run(asyncio.Event(), lambda _: None)
    assert closed[-2:] == [one._shelf, one._client]


async def test_one_whose_batches_fail_ends(closed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Driver) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Driver, "run", fail)
    one = service()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(RuntimeError, match="a defect"):
            await one.run(asyncio.Event(), lambda _: None)
    assert closed[-2:] == [one._shelf, one._client]
