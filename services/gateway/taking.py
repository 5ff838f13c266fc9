"""What a client takes of what was written to it, timed: who takes next to nothing has gone."""

from __future__ import annotations

import asyncio
import socket
import struct

from services.gateway.limits import LEAST_TAKEN_BYTES

TCP_INFO = getattr(socket, "TCP_INFO", None)

ACKED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of Linux' `struct tcp_info`."""


def taken_bytes(transport: asyncio.Transport) -> int:
    """Return a count that grows with each byte that the client takes; only differences mean something.

    It is the kernel's, of what was acknowledged: the kernel asks for more only when a third of its buffer, up to
    megabytes, is free. Where it keeps none it is what the transport holds no more.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and TCP_INFO is not None:
        try:
            return int(ACKED.unpack(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKED.size))[0])
        except (OSError, struct.error):  # no TCP, or an old kernel
            pass
    return -transport.get_write_buffer_size()


class Taking:
    """Breaks a connection off whose client is to take something, and takes less than a least rate."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, timeout_s: float) -> None:
        """Have the client of `transport` take `LEAST_TAKEN_BYTES` in each `timeout_s` of being watched."""
        self._loop = loop
        self._transport = transport
        self._timeout_s = timeout_s
        self._taken_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Expect the client to take what was written, if it is not expected already."""
        if self._timer is None:
            self._taken_bytes = taken_bytes(self._transport)
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def stop(self) -> None:
        """Expect nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if taken_bytes(self._transport) - self._taken_bytes >= LEAST_TAKEN_BYTES:
            self.watch()
        else:
            self._transport.abort()  # not closed: that would wait for the unsent bytes
