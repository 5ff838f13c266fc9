"""A connection to one service: channel options, retries, and the client's view of errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from penstock.credentials import Credentials, Identity, key_from_environment
from penstock.errors import Unavailable, from_rpc
from penstock.tls import TlsFiles, open_channel

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""One gRPC frame; the services use the same number."""

TARGET_FRAME_BYTES = 1024 * 1024
"""A frame is closed once it holds this much, so that frames of large prompts stay far below MAX_MESSAGE_BYTES."""

MAX_FRAME_MESSAGES = 512
"""Requests in one frame: past a few hundred the cost per frame no longer shows beside the cost per request."""

FIRST_PAUSE_S = 0.05
"""First pause before a retry: a restarted service is back within a fraction of a second."""

MOST_PAUSE_S = 2.0
"""Longest pause between retries: bounds how long a returned service stays unnoticed, if its host refused meanwhile."""

CONNECT_S = 3.0
"""Longest an attempt to connect may take: with TLS that is four round trips, to a host that may be far away or busy."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # An idle Watch may be silent for hours; the probe notices a vanished host. Servers allow one in 5 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # for the answer of the process; the other is for its kernel's
    ("grpc.http2.max_pings_without_data", 0),
    # Without these gRPC itself pauses up to two minutes between attempts to connect.
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_PAUSE_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),  # in spite of its name
    ("grpc.max_reconnect_backoff_ms", int(MOST_PAUSE_S * 1000)),
]

T = TypeVar("T")


class Patience:
    """Jittered, doubling pauses, until nothing has succeeded for `retry_for_s` seconds."""

    def __init__(self, retry_for_s: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Give up `retry_for_s` seconds after the last success; `pause` waits (tests pass their own)."""
        self._retry_for_s = retry_for_s
        self._pause = pause
        self._step_s = FIRST_PAUSE_S
        self._until: float | None = None

    def succeeded(self) -> None:
        """Forget the failures: the peer answered."""
        self._step_s = FIRST_PAUSE_S
        self._until = None

    async def wait_or_raise(self, error: Exception) -> None:
        """Pause before the next attempt; raises `error` if patience has run out."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._retry_for_s
        pause_s = self._step_s * random.uniform(0.5, 1.0)
        if now + pause_s > self._until:
            raise error
        self._step_s = min(self._step_s * 2, MOST_PAUSE_S)
        await self._pause(pause_s)


class Connection:
    """A channel to "HOST:PORT" and the patience of its calls."""

    def __init__(
        self, address: str, retry_for_s: float, tls: TlsFiles | None = None, credentials: Credentials | None = None
    ) -> None:
        """Connect lazily; calls are retried on UNAVAILABLE for `retry_for_s` seconds.

        TLS and key are as `tls` and `credentials` say, by default as the environment does; raises TlsError if the
        files of TLS are no good.
        """
        self.address = address
        files = TlsFiles.from_environment() if tls is None else tls
        self._credentials = credentials or Credentials(key_from_environment())
        self.channel = open_channel(address, CHANNEL_OPTIONS, files, self._credentials)
        self._retry_for_s = retry_for_s

    def identity(self) -> Identity:
        """Return for whom a call that is made now, by this task, is made."""
        return self._credentials.metadata()

    def patience(self) -> Patience:
        """Return fresh patience for one call or stream."""
        return Patience(self._retry_for_s)

    async def call(self, method: Callable[[], Awaitable[T]]) -> T:
        """Return what `method` answers, called again while the service is unavailable; it must be safe to repeat.

        Raises the client's error for anything else.
        """
        patience = self.patience()
        while True:
            try:
                return await method()
            except grpc.aio.AioRpcError as error:
                problem = from_rpc(error, self.address)
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED or not isinstance(problem, Unavailable):
                    raise problem from None
            await patience.wait_or_raise(problem)

    async def wait_or_raise(self, patience: Patience, error: grpc.aio.AioRpcError) -> None:
        """Pause before a stream is opened again; raises the client's error if it cannot help."""
        problem = from_rpc(error, self.address)
        if not isinstance(problem, Unavailable):
            raise problem from None
        await patience.wait_or_raise(problem)

    async def close(self) -> None:
        """Close the channel; open calls are cancelled."""
        await self.channel.close()
