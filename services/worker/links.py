"""The worker's two streams, opened again for as long as the worker lives.

Each link waits for its peer, tells the session that a stream can be opened,
writes what the session answers, and reports what arrives. One reader and one
Outbox writer per stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from penstock.queue.v1 import queue_pb2 as q
from penstock.scheduler.v1 import scheduler_pb2 as s
from penstock.tls import Access
from services.core.drain import Drain
from services.rpc.backoff import Backoff
from services.rpc.limits import CHANNEL_OPTIONS
from services.rpc.outbox import Outbox
from services.rpc.peer_stream import Ending, run_stream
from services.rpc.streams import stream_method
from services.worker import wire
from services.worker.core import messages as m
from services.worker.name import Claim, Name

log = logging.getLogger("worker.links")

Up = TypeVar("Up", s.WorkerToScheduler, q.WorkerToQueue)
"""What the worker says on a stream."""

QUEUE = q.DESCRIPTOR.services_by_name["QueueService"]
SCHEDULER = s.DESCRIPTOR.services_by_name["SchedulerService"]


class Dialect(NamedTuple):
    """What differs between the two streams."""

    name: str
    """The peer, for logs."""
    reached: m.Message
    """Said when a stream can be opened."""
    down: m.Message
    """Said when a stream has ended."""
    service: ServiceDescriptor
    method: str
    take: Callable[[Any], None]
    """Takes one frame of the peer."""


class Link(Generic[Up]):
    """One stream to one peer. Messages sent while there is no stream are dropped: the next open says the same."""

    def __init__(
        self,
        address: str,
        access: Access,
        dialect: Dialect,
        post: Callable[[m.Message], None],
        claim: Claim,
        leader: Claim | None = None,
    ) -> None:
        """Connect to `address`; tell `post` of the stream's beginning and end, and `claim` whose the name is there.

        While the name is another's at the peer of `leader` there is no stream.
        """
        self._address = address
        self._access = access
        self._dialect: Dialect = dialect
        self._post = post
        self._outbox = Outbox()
        self._outbox.close()
        self._opening: asyncio.Future[Up] | None = None
        self._waiting = False
        self._finishing = False
        self._opened = False
        """Whether the peer has said something on the present stream."""
        self._backoff = Backoff()
        self._claim = claim
        self._leader = leader
        if leader is not None:
            leader.on_lost = self._end_stream

    def open(self, message: Up) -> None:
        """Open the stream with `message`; the session's answer to `reached`."""
        if self._opening is not None and not self._opening.done():
            self._opening.set_result(message)

    def send(self, message: Up | bytes) -> None:
        """Send a message, encoded or not, on the stream in progress."""
        self._outbox.put(message)

    def send_later(self, make: Callable[[], bytes]) -> None:
        """Send, on the stream in progress, the message that `make` returns when its turn has come."""
        self._outbox.put_later(make)

    @property
    def streaming(self) -> bool:
        """Whether a stream is open or being opened."""
        return not self._outbox.closed

    def finish(self) -> None:
        """Send what is queued, end the stream, and let `run` return."""
        self._finishing = True
        self._outbox.close()

    async def run(self) -> None:
        """Keep the stream open until finished or cancelled.

        Raises NameTakenError if another instance keeps the name of this one, which was never let in.
        """
        async with self._access.open(self._address, CHANNEL_OPTIONS) as channel:
            while not self._finishing:
                if self._leader is not None:
                    await self._leader.ours.wait()
                await self._connected(channel)
                ending = await self._stream(channel)
                if ending.kind is grpc.StatusCode.ALREADY_EXISTS:
                    self._claim.lost(ending.text)
                if not self._finishing:
                    self._say_waiting(ending.text)
                    await asyncio.sleep(self._backoff.next_s())

    async def _connected(self, channel: grpc.aio.Channel) -> None:
        """Return when the peer accepts connections."""
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self._say_waiting("no connection")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def _stream(self, channel: grpc.aio.Channel) -> Ending:
        """Run one stream to its end; return why it ended."""
        self._outbox = Outbox()
        self._opening = asyncio.get_running_loop().create_future()
        self._opened = False
        self._post(self._dialect.reached)
        try:
            self._outbox.put(await self._opening)
            method = stream_method(channel, self._dialect.service, self._dialect.method)
            return await run_stream(method, self._outbox, self._dialect.name, log, self._take)
        finally:
            self._outbox.close()
            self._post(self._dialect.down)

    def _take(self, frame: Any) -> None:
        """Take one frame of the peer; with the first it has let this instance in."""
        if not self._opened:
            self._opened = True
            self._backoff.connected()
            self._claim.won()
            self._waiting = False
            log.info("%s: connected to %s", self._dialect.name, self._address)
        self._dialect.take(frame)

    def _end_stream(self) -> None:
        self._outbox.close()

    def _say_waiting(self, reason: str) -> None:
        """Log, once per loss, that the peer is waited for."""
        if not self._waiting:
            self._waiting = True
            log.warning("%s: waiting for %s (%s)", self._dialect.name, self._address, reason)


def scheduler_link(
    address: str, access: Access, post: Callable[[m.Message], None], on_grant: Callable[[s.Grant], None], name: Name
) -> Link[s.WorkerToScheduler]:
    """Return the Credits link of the worker of this name; `on_grant` gets each Grant, and tells the session."""

    def take(frame: s.CreditsResponse) -> None:
        for message in frame.messages:
            kind = message.WhichOneof("message")
            if kind == "grant":
                on_grant(message.grant)
            elif kind == "open":
                post(m.SchedulerUp(message.open.epoch, message.open.report_interval_ns))
            elif kind == "recall":
                post(m.Recalled(message.recall.request_id))
            elif kind == "drain":
                post(m.DrainHeard(Drain(message.drain.version, message.drain.wanted)))
            else:
                log.warning("scheduler: a message of an unknown kind was ignored")

    dialect = Dialect("scheduler", m.SchedulerReached(), m.SchedulerDown(), SCHEDULER, "Credits", take)
    return Link(address, access, dialect, post, name.at_scheduler, leader=name.at_queue)


def queue_link(
    address: str, access: Access, post: Callable[[m.Message], None], on_deliver: Callable[[q.Deliver], None], name: Name
) -> Link[q.WorkerToQueue]:
    """Return the Work link of the worker of this name; `on_deliver` gets each Deliver, and tells the session."""

    def take(frame: q.WorkResponse) -> None:
        for message in frame.messages:
            if message.WhichOneof("message") == "deliver":
                on_deliver(message.deliver)
                continue
            heard = wire.queue_message(message)
            if heard is None:
                log.warning("queue: a message of an unknown kind was ignored")
            else:
                post(heard)

    dialect = Dialect("queue", m.QueueReached(), m.QueueDown(), QUEUE, "Work", take)
    return Link(address, access, dialect, post, name.at_queue)
