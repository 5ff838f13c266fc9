"""The client for code without an event loop: the same names, blocking."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import math
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.client import DEFAULT_RETRY_FOR_S, AnyRequest, Client
from penstock.connection import CLOSED
from penstock.errors import InvalidRequest, Unavailable
from penstock.fields import RequestFields
from penstock.iteration import BoundedIteration, Mark
from penstock.queue.v1 import queue_pb2
from penstock.results import Cancelled, DeadLetter, RequestInfo, Requeued, Result, Submitted, TokenDelta
from penstock.scheduler.v1 import scheduler_pb2
from penstock.source_thread import SourceThread
from penstock.tls import TlsFiles
from penstock.watching import Event

T = TypeVar("T")

SETTLE_S = 1.0
"""The tasks of a closed client are given so long to end by themselves; they take milliseconds."""

LOOK_S = 1.0
"""Longest wait at one go. Python sees a signal that comes in the instant in which a wait begins only when that ends: a
Ctrl-C may be this late, and is not lost."""

FORKED = "a client does not outlive a fork; start the process with multiprocessing's spawn or forkserver"
OWN_THREAD = "a call would wait for itself in the client's own thread (the garbage collector runs finalizers in any)"


class SyncClient:
    """Blocking facade of `Client`. Use as `with SyncClient("HOST:PORT") as client:`; safe to share between threads.

    Every call raises Unavailable once the client is closed, also those that wait already, and in a child process that
    was forked while there was a client: its thread stays with the parent.
    """

    def __init__(
        self,
        queue: str = DEFAULT_QUEUE_ADDRESS,
        scheduler: str = DEFAULT_SCHEDULER_ADDRESS,
        *,
        retry_for_s: float = DEFAULT_RETRY_FOR_S,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
        tenant: str = "",
    ) -> None:
        """Start the thread that talks to the services at these "HOST:PORT" addresses.

        See `Client` for the other arguments and what they raise.
        """
        self._pid = os.getpid()
        self._beginning = threading.RLock()
        """Held while something is given to the loop. The garbage collector and signals may come in between."""
        self._ending = threading.RLock()
        """Held while the client is closed, which others wait for."""
        self._closed = threading.Event()
        """Set when nothing more is given to the loop."""
        self._timeout_s = math.inf
        """Longest that a call, or a step of an iteration, is waited for."""
        self._open: set[_Steps[Any]] = set()
        """What iterators read; held here, so that the garbage collector never closes it beside their own end."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_made(queue, scheduler, retry_for_s, tls, api_key, tenant))
        except BaseException:
            self._end_thread()  # nobody gets a client to close
            raise

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a second call does nothing, nor does one in a forked child.

        Raises Unavailable where a finalizer calls it in the client's own thread, which cannot wait for its end.
        """
        if os.getpid() != self._pid or sys.is_finalizing():
            return  # the thread is not here, or does not run any more
        self._refuse_own_thread()
        with self._beginning:
            self._closed.set()  # from here on the loop is given nothing but what follows
        with self._ending:
            for last in (self._client.close, _settled):
                if not self._gone():  # a signal's handler may close it in the midst of this
                    with suppress(Unavailable):
                        self._result(asyncio.run_coroutine_threadsafe(last(), self._loop))
            self._end_thread()

    def _end_thread(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def within(self, timeout_s: float) -> Self:
        """Return this client with a bound: a call, or a step of an iteration, that takes longer raises TimeoutError.

        A call is then given up: its request goes on, a submit may have been stored, a cancel or delete been done. A
        step is not: the next one waits for the same. What this returns shares all else with the client; to close one
        is to close both. Raises InvalidRequest unless `timeout_s`, in seconds, is above 0.
        """
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise InvalidRequest(f"timeout_s: must be a number above 0, not {timeout_s!r}", "timeout_s")
        bounded = copy.copy(self)
        bounded._timeout_s = timeout_s
        return bounded

    def submit(self, **fields: Unpack[RequestFields]) -> str:
        """Submit one request and return its id once it is durable."""
        return self._run(self._client.submit(**fields))

    def submit_many(self, requests: Iterable[AnyRequest], *, wait_for_quota: bool = False) -> Iterator[Submitted]:
        """Submit requests over one stream; yield an ack for each once it is durable or refused.

        `requests` is read in a thread of its own, some way ahead of the acks; it may call this client. What it raises
        is raised here once what it gave before is acked.
        """
        return self._bounded(self._acks(requests, wait_for_quota))

    def _acks(
        self, requests: Iterable[AnyRequest], wait_for_quota: bool
    ) -> Generator[Submitted | Literal[Mark.LATE], None, None]:
        self._refuse_closed()  # before the source is read
        # Made ready where they are read: a source may change what it has given as soon as it is asked for the next.
        source = SourceThread(map(self._client.prepared, requests), self._loop)
        try:
            yield from self._each(self._client.submit_prepared(source.items(), wait_for_quota))
            source.raise_failure()
        finally:
            source.leave()

    def generate(self, **fields: Unpack[RequestFields]) -> Result:
        """Submit one request and return its result, however it ended."""
        return self._run(self._client.generate(**fields))

    def result(self, request_id: str) -> Result:
        """Wait until the request has ended and return its result."""
        return self._run(self._client.result(request_id))

    def get(self, request_id: str | None = None, *, idempotency_key: str = "", tenant: str = "") -> RequestInfo:
        """Return the state of a request, named by its id or by its idempotency key."""
        return self._run(self._client.get(request_id, idempotency_key=idempotency_key, tenant=tenant))

    def watch(
        self, batch: str | None = None, *, request_ids: Sequence[str] = (), cursor: int = 0, follow: bool = False
    ) -> Iterator[Result]:
        """Yield results of a batch, or of at most 10,000 named requests, in completion order."""
        return self._bounded(
            self._each(self._client.watch(batch, request_ids=request_ids, cursor=cursor, follow=follow))
        )

    def events(
        self,
        batch: str | None = None,
        *,
        request_ids: Sequence[str] = (),
        cursor: int = 0,
        follow: bool = False,
        tokens: bool = False,
    ) -> Iterator[Event]:
        """Yield results, progress and (with `tokens`) token deltas."""
        events = self._client.events(batch, request_ids=request_ids, cursor=cursor, follow=follow, tokens=tokens)
        return self._bounded(self._each(events))

    def tokens(self, request_id: str) -> Iterator[TokenDelta]:
        """Yield the tokens of one request while they are generated, until it has ended."""
        return self._bounded(self._each(self._client.tokens(request_id)))

    def cancel(self, *request_ids: str, batch: str | None = None) -> Cancelled:
        """Cancel the named requests, or what has not ended of a batch: at least as many as are counted."""
        return self._run(self._client.cancel(*request_ids, batch=batch))

    def delete(self, *request_ids: str, batch: str | None = None) -> int:
        """Delete results that have been read; return how many, of a batch at least: `Client.delete`."""
        return self._run(self._client.delete(*request_ids, batch=batch))

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters, oldest first."""
        return self._bounded(self._each(self._client.dead_letters()))

    def requeue(self, *request_ids: str, all_dead: bool = False) -> Requeued:
        """Put dead letters back to the front of their lines: the named ones, or all."""
        return self._run(self._client.requeue(*request_ids, all_dead=all_dead))

    def stats(self) -> queue_pb2.StatsResponse:
        """Return the queue's counts per channel."""
        return self._run(self._client.stats())

    def fleet(self, names_only: bool = False) -> scheduler_pb2.StatusResponse:
        """Return the scheduler's view of workers, channels and credits; with `names_only` what it tells every key."""
        return self._run(self._client.fleet(names_only))

    def models(self) -> frozenset[str]:
        """Return the names that models answer to just now, which the scheduler tells to every key."""
        return self._run(self._client.models())

    def drain_worker(self, worker_id: str) -> int:
        """Stop granting to a worker; return how many reservations it still has."""
        return self._run(self._client.drain_worker(worker_id))

    def undrain_worker(self, worker_id: str) -> None:
        """Let a drained worker have grants again."""
        self._run(self._client.undrain_worker(worker_id))

    def backup(self, name: str = "") -> queue_pb2.BackupResponse:
        """Have the queue write a consistent copy of its store beside it; return where it is and what it holds."""
        return self._run(self._client.backup(name))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns on the loop. Raises TimeoutError, and Unavailable if nothing runs there."""
        future = self._begun(work)
        with self._given_up_on_failure(future):
            answer = self._result(future, self._timeout_s)
            if answer is Mark.LATE:
                raise TimeoutError(self._late)
            return answer

    @property
    def _late(self) -> str:
        return f"there is no answer after {self._timeout_s:g} s"

    def _begun(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have a caller's `work` run on the loop. Raises Unavailable if it will not."""
        try:
            self._refuse_own_thread()
            return self._begin(work)
        except Unavailable:
            work.close()
            raise

    @contextmanager
    def _given_up_on_failure(self, future: concurrent.futures.Future[Any]) -> Iterator[None]:
        """Cancel what runs on the loop if anything is raised inside."""
        try:
            yield
        except BaseException:
            if not self._gone():
                future.cancel()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have `work` run on the loop. Raises Unavailable if it will not."""
        self._refuse_closed()  # where other threads have stopped, one may have stopped with the lock
        with self._beginning:
            self._refuse_closed()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, future: concurrent.futures.Future[T], timeout_s: float = math.inf) -> T | Literal[Mark.LATE]:
        """Wait for what runs on the loop; LATE if that takes longer. Raises Unavailable if nothing does any more."""
        until = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(max(0.0, min(LOOK_S, until - time.monotonic())))
                except TimeoutError:
                    if future.done():  # it is the work's own, or the work has ended just now
                        return future.result()
                if why := self._gone():
                    raise Unavailable(why)
                if time.monotonic() >= until:
                    return Mark.LATE
        except concurrent.futures.CancelledError:
            if not self._closed.is_set():
                raise
            raise Unavailable(CLOSED) from None

    def _gone(self) -> str:
        """Return why the loop's thread does not run, empty if it does."""
        if os.getpid() != self._pid:
            return FORKED
        # At the end of the process daemon threads stop where they are, without being told.
        return CLOSED if sys.is_finalizing() or not self._thread.is_alive() else ""

    def _refuse_closed(self) -> None:
        """Raise Unavailable if nothing more can be given to the loop."""
        why = self._gone() or (CLOSED if self._closed.is_set() else "")
        if why:
            raise Unavailable(why)

    def _refuse_own_thread(self) -> None:
        """Raise Unavailable where to wait for the loop would be to wait for oneself."""
        if threading.current_thread() is self._thread:
            raise Unavailable(OWN_THREAD)

    def _bounded(self, items: Generator[T | Literal[Mark.LATE], None, None]) -> Iterator[T]:
        return BoundedIteration(items, self._late)

    def _each(self, items: AsyncGenerator[T, None]) -> Generator[T | Literal[Mark.LATE], None, None]:
        """Yield what the asynchronous generator yields, LATE before each that is; closing this has it closed."""
        steps = _Steps(items)
        self._open.add(steps)
        try:
            while True:
                step = self._begun(steps.next())
                with self._given_up_on_failure(step):
                    while (item := self._result(step, self._timeout_s)) is Mark.LATE:
                        yield Mark.LATE
                if item is Mark.END:
                    return
                yield item
        finally:
            # Not waited for: of an iterator that was left, the garbage collector runs this, in whichever thread it
            # works, the client's own among them.
            closing = self._closed_steps(steps)
            try:
                self._begin(closing)
            except Unavailable:
                closing.close()
                self._open.discard(steps)

    async def _closed_steps(self, steps: _Steps[Any]) -> None:
        """Close what an iterator has read."""
        try:
            await steps.close()
        finally:
            self._open.discard(steps)


async def _made(
    queue: str, scheduler: str, retry_for_s: float, tls: TlsFiles | None, api_key: str | None, tenant: str
) -> Client:
    """Make the client on the loop its channels will live on."""
    return Client(queue, scheduler, retry_for_s=retry_for_s, tls=tls, api_key=api_key, tenant=tenant)


async def _settled() -> None:
    """Return when nothing runs on this loop any more: gRPC's own tasks hear of the end of a call after its caller."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=SETTLE_S)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Steps(Generic[T]):
    """An asynchronous generator, taken one item after the other by a thread that may stop waiting for one (Ctrl-C)."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._last: asyncio.Task[Any] | None = None

    async def next(self) -> T | Literal[Mark.END]:
        """Return the next item, END after the last."""
        self._last = asyncio.current_task()
        return await anext(self._items, Mark.END)

    async def close(self) -> None:
        """Close the generator once it is no longer being asked: a step that was cancelled may be still at its end."""
        if self._last is not None:
            await asyncio.wait([self._last])
        await self._items.aclose()
