"""A connection to one service: channel options, retries, and the client's view of errors."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TypeAlias, TypeVar

from penstock.credentials import Credentials, Identity, key_from_environment
from penstock.errors import InvalidRequest, PenstockError, Unavailable, from_rpc
from penstock.limits import (
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_MESSAGE_BYTES,
    PING_TIMEOUT_MS,
    RESOLVE_MS,
)
from penstock.loaded import grpc
from penstock.tls import DIRECT, TlsFiles, open_channel

CONNECT_S = 3.0
"""Longest an attempt to connect may take: with TLS that is four round trips, to a host that may be far away or busy."""

MAX_WATCHES = 600
"""That one client has open. A service takes 1,024 calls of a connection, and what is beyond waits inside gRPC without a
word; single submits have up to 256 streams, and the rest is for short calls."""

MAX_SUBMITS = 100
"""Submits of many that one client has open. They end by themselves, so they wait for each other and not for watches."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    DIRECT,
    # A connection of its own: clients that shared one would share its watches as well.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Without these gRPC itself pauses up to two minutes between attempts to connect.
    ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_FIRST_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S * 1000)),  # in spite of its name
    ("grpc.max_reconnect_backoff_ms", int(BACKOFF_MOST_S * 1000)),
    ("grpc.dns_min_time_between_resolutions_ms", RESOLVE_MS),
]

CLOSED = "the client was closed"
"""What those hear who are in a call when the client is closed, and who call it afterwards."""

FORKED = (
    "gRPC does not outlive a fork: this process was forked from one that had used a client; start such processes with "
    "multiprocessing's spawn or forkserver, or make no client before the fork"
)
OTHER_LOOP = "a Client belongs to the event loop it was made in; make it in the coroutine that uses it"

NO_LOOP = "a Client belongs to an event loop, and this thread has none; make it in a coroutine, or use a SyncClient"

T = TypeVar("T")

Turn: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]
"""What an attempt of a call has to have while it is made; pauses between attempts have it not."""


class Patience:
    """Jittered, doubling pauses, until nothing has succeeded for `retry_for_s` seconds."""

    def __init__(self, retry_for_s: float, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Give up `retry_for_s` seconds after the last success; `pause` waits (tests pass their own)."""
        self._retry_for_s = retry_for_s
        self._pause = pause
        self._step_s = BACKOFF_FIRST_S
        self._until: float | None = None

    def succeeded(self) -> None:
        """Forget the failures: the peer answered."""
        self._step_s = BACKOFF_FIRST_S
        self._until = None

    async def wait_or_raise(self, error: Exception) -> None:
        """Pause before the next attempt; raises `error` if patience has run out."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._retry_for_s
        pause_s = self._step_s * random.uniform(0.5, 1.0)
        if now + pause_s > self._until:
            raise error
        self._step_s = min(self._step_s * 2, BACKOFF_MOST_S)
        await self._pause(pause_s)


class Connection:
    """A channel to "HOST:PORT" and the patience of its calls."""

    def __init__(
        self, address: str, retry_for_s: float, tls: TlsFiles | None = None, credentials: Credentials | None = None
    ) -> None:
        """Connect lazily; calls are retried on UNAVAILABLE for `retry_for_s` seconds.

        TLS and key are as `tls` and `credentials` say, by default as the environment does; raises TlsError if the
        files of TLS are no good, InvalidRequest if `retry_for_s` is no number, and PenstockError in a process that was
        forked from one with connections, or in a thread without an event loop.
        """
        _refuse_fork()
        if not isinstance(retry_for_s, int | float) or math.isnan(retry_for_s):
            raise InvalidRequest(f"retry_for_s: must be a number of seconds, not {retry_for_s!r}", "retry_for_s")
        self.address = address
        files = TlsFiles.from_environment() if tls is None else tls
        self._credentials = credentials or Credentials(key_from_environment())
        try:
            self.channel = open_channel(address, CHANNEL_OPTIONS, files, self._credentials)
        except RuntimeError:
            _loop_of_channels()  # raises what gRPC means, if that is what is missing
            raise
        self._loop = _loop_of_channels()
        if not _first_pid:
            _first_pid.append(os.getpid())
        self._retry_for_s = retry_for_s
        self._closing = asyncio.Event()
        self._watches, self._submits = asyncio.Semaphore(MAX_WATCHES), asyncio.Semaphore(MAX_SUBMITS)

    @property
    def closed(self) -> bool:
        """Whether nothing more is asked over it, and what is asked already is about to end."""
        return self._closing.is_set()

    def identity(self) -> Identity:
        """Return for whom a call that is made now, by this task, is made."""
        return self._credentials.metadata()

    def patience(self) -> Patience:
        """Return fresh patience for one call or stream, whose pauses end when the client is closed."""
        return Patience(self._retry_for_s, self.pause)

    async def pause(self, pause_s: float) -> None:
        """Wait; raises Unavailable as soon as the client is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
            raise Unavailable(CLOSED)

    async def call(self, method: Callable[[], Awaitable[T]], turn: Turn = nullcontext) -> T:
        """Return what `method` answers, called again while the service is unavailable; it must be safe to repeat.

        Each attempt is made within a `turn`. Raises the client's error for anything else.
        """
        patience = self.patience()
        while True:
            try:
                async with turn():
                    with self.until_closed():
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

    def check_open(self) -> None:
        """Raise Unavailable if the client was closed, and PenstockError if it belongs to another event loop."""
        if self.closed:
            raise Unavailable(CLOSED)
        if self._loop is not asyncio.get_running_loop():
            # gRPC would leave the call waiting for a loop that nobody runs.
            raise PenstockError(OTHER_LOOP)

    @contextmanager
    def until_closed(self) -> Iterator[None]:
        """Make calls inside; raises Unavailable in place of what gRPC raises because the client is closed meanwhile.

        gRPC cancels the calls of a channel that is closed, and their callers with them, whom nobody has cancelled.
        """
        self.check_open()
        try:
            yield
        except grpc.aio.UsageError:
            if not self.closed:
                raise
        except asyncio.CancelledError:
            if not self.closed or cancelled_by_somebody():
                raise
        else:
            return
        raise Unavailable(CLOSED) from None

    def begin_to_close(self) -> None:
        """Refuse new calls, and have those that pause before another attempt end."""
        self._closing.set()
        for places in (self._watches, self._submits):
            places.release()  # who waits for one hears that the client is closed, and lets the next hear

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch inside; see `until_closed`. Raises Unavailable if there are MAX_WATCHES, and none ends meanwhile."""
        async with self._one_of(self._watches, f"{MAX_WATCHES} watches are open, the most of one client"):
            yield

    @asynccontextmanager
    async def submit(self) -> AsyncIterator[None]:
        """Submit many inside; see `until_closed`. Raises Unavailable if there are MAX_SUBMITS, and none ends."""
        async with self._one_of(self._submits, f"{MAX_SUBMITS} submits of many are open, the most of one client"):
            yield

    @asynccontextmanager
    async def _one_of(self, places: asyncio.Semaphore, none_left: str) -> AsyncIterator[None]:
        """Have one of the places inside; wait for it for `retry_for_s` seconds, and then raise Unavailable."""
        self.check_open()
        try:
            async with asyncio.timeout(self._retry_for_s):
                await places.acquire()
        except TimeoutError:
            raise Unavailable(none_left) from None
        try:
            with self.until_closed():
                yield
        finally:
            places.release()

    async def close(self) -> None:
        """Close the channel; open calls are cancelled."""
        self.begin_to_close()
        await self.channel.close()


def cancelled_by_somebody() -> bool:
    """Return whether a CancelledError is meant for this task, and does not come out of a call that gRPC cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_first_pid: list[int] = []
"""The process that opened the first connection, from which on gRPC has threads and locks that a fork breaks."""


def _refuse_fork() -> None:
    """Raise PenstockError where gRPC would crash or wait for ever."""
    if _first_pid and _first_pid[0] != os.getpid():
        raise PenstockError(FORKED)


def _loop_of_channels() -> asyncio.AbstractEventLoop:
    """Return the event loop to which gRPC ties a channel that is made now. Raises PenstockError if there is none."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        raise PenstockError(NO_LOOP) from None
