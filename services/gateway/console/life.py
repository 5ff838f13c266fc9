"""The console's life: its own connections to the services, and the sampling that goes on while nobody looks."""

from __future__ import annotations

import asyncio

from starlette.routing import Route

from penstock.client import Client
from services.gateway.batch.records import BatchRecords
from services.gateway.console.guard import host_name
from services.gateway.console.lookout import Lookout
from services.gateway.console.routes import Console
from services.gateway.doorman import Doorman
from services.gateway.generation import Parts
from services.gateway.settings import GatewaySettings
from services.gateway.shelf import Shelf


class ConsoleLife:
    """Routes of the console, and what must be closed after them; nothing if the console is switched off."""

    def __init__(self, settings: GatewaySettings, parts: Parts) -> None:
        """Begin to sample, beside a gateway of these settings and parts."""
        self.routes: list[Route] = []
        if not settings.console:
            return
        # Not the gateway's own connections: those wait for a queue that is away, the console says so.
        self._client = Client(
            settings.queue_address,
            settings.scheduler_address,
            retry_for_s=0,
            tls=settings.tls_files,
            api_key=settings.key.get_secret_value(),
        )
        self._shelf = Shelf(settings.queue_address, 0, settings.access)
        doorman = Doorman(self._client if settings.has_credentials else None)
        lookout = Lookout(self._client, BatchRecords(self._shelf), parts.recent)
        self._sampling = asyncio.create_task(lookout.run(), name="console samples")
        names = [name for name in (*settings.console_hosts, host_name(settings.listen)) if name]
        self.routes = Console(self._client, lookout, parts.intake, names, doorman).routes()

    async def close(self) -> None:
        """Stop sampling and hang up."""
        if self.routes:
            self._sampling.cancel()
            await self._shelf.close()
            await self._client.close()
