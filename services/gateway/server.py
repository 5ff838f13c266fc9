"""The gateway's HTTP server and its socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from penstock.exits import EX_UNAVAILABLE
from services.gateway.limits import IDLE_CONNECTION_S, MAX_CLOSING_S
from services.gateway.protocol import BoundedProtocol
from services.gateway.settings import GatewaySettings
from services.rpc.tls import security_of

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
