"""A gRPC server as every service starts it: limits, health, reflection, clear bind errors."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from penstock.exits import EX_UNAVAILABLE
from services.descriptors import raise_file_limit
from services.rpc.health_servicer import SERVICE as HEALTH_SERVICE
from services.rpc.health_servicer import HealthServicer
from services.rpc.limits import MAX_CALLS, MAX_KEYLESS_CALLS_OF_HOST, SERVER_OPTIONS
from services.rpc.strict import Doorkeeper, add_servicer
from services.rpc.tls import PLAIN, Security


@dataclass
class Server:
    """A bound server with its health servicer; the port is the real one if 0 was asked for."""

    grpc_server: grpc.aio.Server
    port: int
    service_names: Sequence[str]
    _health: HealthServicer = field(repr=False)

    async def start(self) -> None:
        """Serve, and report the process and every service as SERVING."""
        await self.grpc_server.start()
        self._health.report("")
        self.report(serves=True)

    def report(self, serves: bool) -> None:
        """Report every service as SERVING or not. The process as a whole, which lives, serves until `stop`."""
        for name in self.service_names:
            self._health.report(name, serves)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, then end open calls after `grace_s` seconds."""
        self._health.stop()  # no coroutine: nobody who asks how this process is can keep it from ending
        await self.grpc_server.stop(grace_s)


def bind(
    listen: str,
    service_names: Sequence[str],
    add: Callable[[grpc.aio.Server], None],
    security: Security = PLAIN,
    reflected: bool = False,
) -> Server:
    """Make a server on `listen` ("HOST:PORT"), guarded by `security`; `add` registers the servicers.

    With `reflected` it describes them to whoever asks. Neither that nor their health asks for a key.

    Prints the reason and raises SystemExit(69) if the port cannot be had.
    """
    raise_file_limit()
    logging.getLogger("grpc._cython.cygrpc").addFilter(in_one_line)
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    add(server)
    health = HealthServicer()
    # Doorkeepers of their own: a probe is answered also where its host has all the calls open that it may have.
    add_servicer(HEALTH_SERVICE, health, server, Doorkeeper(MAX_KEYLESS_CALLS_OF_HOST))
    if reflected:
        _add_reflection(server, service_names)
    require_port(listen)
    try:
        port = security.add_port(server, _everywhere(listen))
    except (OSError, RuntimeError) as error:
        raise _cannot_listen(listen, error) from None
    return Server(server, port, service_names, health)


def _add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    from grpc_reflection.v1alpha import reflection, reflection_pb2  # for whom it is asked for: it is off by default

    service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    describer = reflection.aio.ReflectionServicer([*service_names, HEALTH_SERVICE.full_name, service.full_name])
    add_servicer(service, describer, server, Doorkeeper(MAX_KEYLESS_CALLS_OF_HOST))


def in_one_line(record: logging.LogRecord) -> bool:
    """Have what gRPC logs of a call that could not be answered be a warning without a stack trace; keep every record.

    In most cases its client has hung up, and many can do so at once. The trace has gRPC's own lines, and no more.
    """
    if record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError":
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
    return True


def require_port(listen: str) -> None:
    """Bind and release the port, because gRPC's own bind error does not say why it failed.

    Prints the reason and raises SystemExit(69) if the port cannot be had.
    """
    try:
        _probe(_everywhere(listen))
    except OSError as error:
        raise _cannot_listen(listen, error) from None


def _everywhere(listen: str) -> str:
    """Return the address with the host that a missing one stands for."""
    return listen if not listen.startswith(":") else f"0.0.0.0{listen}"


def _cannot_listen(listen: str, error: Exception) -> SystemExit:
    print(f"cannot listen on {listen}: {_reason(error)}", file=sys.stderr)
    return SystemExit(EX_UNAVAILABLE)


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        in_use = error.errno == 98
        return "the port is in use by another process" if in_use else error.strerror
    return str(error)


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        if stop.is_set():
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop)
    return stop
