"""The gateway service put together: clients of queue and scheduler, routes, batches, and their lives until SIGTERM."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.client import Client
from services.descriptors import raise_file_limit
from services.gateway.admission import Admission
from services.gateway.app import Front, make_app
from services.gateway.batch.driver import Driver
from services.gateway.batch.output import Output
from services.gateway.batch.records import BatchRecords
from services.gateway.batches import Batches
from services.gateway.console.life import ConsoleLife
from services.gateway.doorman import Doorman
from services.gateway.files import Files
from services.gateway.generation import Parts
from services.gateway.intake import Intake
from services.gateway.limits import SETTLE_S
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import Pages
from services.gateway.served import Served
from services.gateway.server import bind, make_server
from services.gateway.settings import GatewaySettings
from services.gateway.shelf import Shelf
from services.gateway.vigil import Vigil
from services.life import Loops, say_ready
from services.telemetry import Telemetry


class Service:
    """One gateway service. Make it inside the event loop that runs it."""

    def __init__(self, settings: GatewaySettings, telemetry: Telemetry, metrics: GatewayMetrics) -> None:
        """Put the parts together; nothing runs yet."""
        self._settings = settings
        self._client = client = Client(
            settings.queue_address,
            settings.scheduler_address,
            retry_for_s=settings.queue_patience_s,
            tls=settings.tls_files,
            api_key=settings.key.get_secret_value(),
        )
        self._admission = Admission(client, metrics)
        intake = Intake(settings.body_timeout_s)
        doorman = Doorman(client if settings.has_credentials else None)
        self._vigil = vigil = Vigil(client if settings.has_credentials else None)
        served = Served(client.fleet, time.monotonic)
        pages = Pages()
        parts = Parts(client, self._admission, intake, served, metrics, telemetry, pages, doorman=doorman, vigil=vigil)
        self._front = Front(parts)
        self._shelf = shelf = Shelf(settings.queue_address, settings.queue_patience_s, settings.access)
        records = BatchRecords(shelf)
        self._driver = Driver(client, shelf, records, served, metrics, settings.batch_lease_s)
        # Its turns are others than the driver's: downloads keep no batch waiting.
        output = Output(client, shelf, pages=pages)
        most_bytes, silence_s = settings.max_file_bytes, settings.body_timeout_s
        files = Files(shelf, records, output, pages, metrics, vigil, doorman, most_bytes, silence_s)
        batches = Batches(client, shelf, records, output, intake, pages, vigil, doorman, self._driver.wake)
        self._console = ConsoleLife(settings, parts)
        self._app = make_app(parts, self._front, [*files.routes(), *batches.routes(), *self._console.routes])

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; call `ready` with the port once connections are accepted.

        Raises SystemExit(69) if the port cannot be had, and what ended a part of the service before `stop`.
        """
        settle_until_s = time.monotonic()
        try:
            server, listening = make_server(self._app, self._settings), bind(self._settings.listen)
            loops = Loops(server=server.serve([listening]), driver=self._driver.run())
            ready(listening.getsockname()[1])
            await loops.until(stop)
            # One deadline for all of the end: a queue that is away is no reason to outlast what comes with SIGKILL.
            settle_until_s = time.monotonic() + self._settings.shutdown_grace_s + SETTLE_S
            self._front.draining = server.should_exit = True
            # Another gateway goes on with the batches while this one's streams end.
            await loops.end("server", within_s=settle_until_s - time.monotonic())
        finally:
            await self._close(settle_until_s)

    async def _close(self, settle_until_s: float) -> None:
        await self._console.close()
        await self._vigil.close()
        await self._admission.settle(settle_until_s - time.monotonic())
        await self._shelf.close()
        await self._client.close()


async def serve(settings: GatewaySettings, stop: asyncio.Event, telemetry: Telemetry) -> int:
    """Run the gateway service until `stop`; then finish what is open, as long as the grace lasts."""
    raise_file_limit()
    service = Service(settings, telemetry, GatewayMetrics())
    await service.run(stop, lambda port: say_ready("gateway", settings.listen, port))
    return 0
