"""The gateway's life: its socket, its server, and the drain at SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.applications import Starlette

from penstock.client import Client
from penstock.exits import EX_UNAVAILABLE
from penstock.telling import tell
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
from services.gateway.limits import IDLE_CONNECTION_S, MAX_CLOSING_S, SETTLE_S
from services.gateway.metrics import GatewayMetrics
from services.gateway.pages import Pages
from services.gateway.protocol import BoundedProtocol
from services.gateway.served import Served
from services.gateway.settings import GatewaySettings
from services.gateway.shelf import Shelf
from services.gateway.vigil import Vigil
from services.rpc.server import stop_on_signals
from services.rpc.tls import security_of
from services.telemetry import Telemetry

log = logging.getLogger("uvicorn.error")

BACKLOG = 2048
"""Connections the kernel holds until they are accepted: a burst of a thousand clients and as many again."""


class Server(uvicorn.Server):
    """uvicorn, told to stop by us: one process has one place that knows of signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections at `sockets`.

        uvicorn would leave it to the loop how long the client of one over TLS has for what is unsent when it is closed,
        which is half a minute, however steadily it takes it. `BoundedProtocol` has a bound for that. To greet it has as
        long as for a head: the loop would give it a minute.
        """
        await super().startup(sockets=[])
        left_s = MAX_CLOSING_S if self.config.ssl else None
        greeting_s = BoundedProtocol.head_timeout_s if self.config.ssl else None
        loop = asyncio.get_running_loop()
        for sock in sockets or []:
            backlog, ssl = self.config.backlog, self.config.ssl
            self.servers.append(
                await loop.create_server(
                    self._connection,
                    sock=sock,
                    ssl=ssl,
                    backlog=backlog,
                    ssl_handshake_timeout=greeting_s,
                    ssl_shutdown_timeout=left_s,
                )
            )

    def _connection(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is open end; who is cut off then has an answer that says so, and is no fault to be traced."""
        log.addFilter(_is_no_cut)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _is_no_cut(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's is about something else than one request that was cut off; another counts those."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


async def serve(settings: GatewaySettings, telemetry: Telemetry) -> None:
    """Serve until SIGTERM; then finish what is open, as long as the grace period lasts."""
    stop = stop_on_signals()
    raise_file_limit()
    listening = bind(settings.listen)
    client = Client(
        settings.queue_address,
        settings.scheduler_address,
        retry_for_s=settings.queue_patience_s,
        tls=settings.tls_files,
        api_key=settings.key.get_secret_value(),
    )
    metrics = GatewayMetrics()
    admission = Admission(client, metrics)
    intake = Intake(settings.body_timeout_s)
    doorman = Doorman(client if settings.has_credentials else None)
    vigil = Vigil(client if settings.has_credentials else None)
    served = Served(client.fleet, time.monotonic)
    pages = Pages()
    parts = Parts(client, admission, intake, served, metrics, telemetry, pages, doorman=doorman, vigil=vigil)
    front = Front(parts)
    shelf = Shelf(settings.queue_address, settings.queue_patience_s, settings.access)
    records = BatchRecords(shelf)
    driver = Driver(client, shelf, records, parts.served, metrics, settings.batch_lease_s)
    # Its turns are others than the driver's: downloads keep no batch waiting.
    output = Output(client, shelf, pages=pages)
    most_bytes, silence_s = settings.max_file_bytes, settings.body_timeout_s
    files = Files(shelf, records, output, pages, metrics, vigil, doorman, most_bytes, silence_s)
    batches = Batches(client, shelf, records, output, intake, doorman, driver.wake)
    console = ConsoleLife(settings, parts)
    routes = [*files.routes(), *batches.routes(), *console.routes]
    server = make_server(make_app(parts, front, routes), settings)
    serving = asyncio.create_task(server.serve([listening]))
    host, port = settings.listen.rpartition(":")[0] or "0.0.0.0", listening.getsockname()[1]
    tell(f"ready: gateway on {host}:{port}", sys.stdout)
    stopping = asyncio.create_task(stop.wait())
    driving = asyncio.create_task(driver.run(), name="driver")
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    # One deadline for all of the end: a queue that is away is no reason to outlast what comes with SIGKILL.
    settle_until_s = time.monotonic() + settings.shutdown_grace_s + SETTLE_S
    front.draining = server.should_exit = True
    # Another gateway goes on with the batches while this one's streams end.
    driving.cancel()
    try:
        await serving
    finally:
        stopping.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(settle_until_s - time.monotonic()):
                await asyncio.gather(driving, return_exceptions=True)
        await console.close()
        await vigil.close()
        await admission.settle(settle_until_s - time.monotonic())
        await shelf.close()
        await client.close()


def make_server(app: Starlette, settings: GatewaySettings) -> Server:
    """Return the HTTP server of `app`."""
    BoundedProtocol.head_timeout_s = settings.head_timeout_s
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE_CONNECTION_S),
        timeout_graceful_shutdown=max(1, int(settings.shutdown_grace_s)),
        backlog=BACKLOG,
    )
    config.load()
    # After uvicorn's own, which would read the files once and keep them.
    config.ssl = security_of(settings).context()
    return Server(config)


def bind(listen: str) -> socket.socket:
    """Return a socket bound to "HOST:PORT"; prints the reason and raises SystemExit(69) if it cannot be had."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
        # Taken now, not when the server begins: a port that is in use is found at once, and clients can connect.
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"cannot listen on {listen}: {reason}", file=sys.stderr)
        raise SystemExit(EX_UNAVAILABLE) from None
    return bound
