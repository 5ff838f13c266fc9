"""The worker's two streams, opened again for as long as the worker lives.

Each link waits for its peer, tells the session that a stream can be opened,
writes what the session answers, and reports what arrives. One reader and one
Outbox writer per stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from penstock.connection import cancelled_by_somebody
from penstock.queue.v1 import queue_pb2 as q
from penstock.scheduler.v1 import scheduler_pb2 as s
from penstock.tls import Access
from services.rpc.backoff import Backoff
from services.rpc.limits import CHANNEL_OPTIONS
from services.rpc.names import ASK_S, NameTakenError
from services.rpc.outbox import Outbox
from services.rpc.streams import stream_method
from services.rpc.unread import end_unread
from services.worker import wire
from services.worker.core import messages as m

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
        ask_s: float = ASK_S,
    ) -> None:
        """Connect to `address`; tell `post` of the stream's beginning and end.

        A worker that was never let in asks for `ask_s` seconds for a name that another instance has.
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
        self._ask_s = ask_s
        self._taken_s: float | None = None
        self.let_in = asyncio.Event()
        """Set for good when the peer has taken this instance in."""
        self._name_ours = asyncio.Event()
        self._name_ours.set()
        self._lead: Link[Any] | None = None
        self._follower: Link[Any] | None = None

    def follow(self, lead: Link[Any]) -> None:
        """Have no stream from when `lead`'s peer says that the name is another instance's until it lets this one in.

        Without it two instances that have both been let in once might hold one stream each, and neither do any work.
        """
        self._lead = lead
        lead._follower = self

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
        backoff = Backoff()
        async with self._access.open(self._address, CHANNEL_OPTIONS) as channel:
            while not self._finishing:
                if self._lead is not None:
                    await self._lead._name_ours.wait()
                await self._connected(channel)
                reason = await self._stream(channel, backoff)
                if not self._finishing:
                    self._say_waiting(reason)
                    await asyncio.sleep(backoff.next_s())

    async def _connected(self, channel: grpc.aio.Channel) -> None:
        """Return when the peer accepts connections."""
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self._say_waiting("no connection")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def _stream(self, channel: grpc.aio.Channel, backoff: Backoff) -> str:
        """Run one stream to its end; return why it ended."""
        self._outbox = Outbox()
        self._opening = asyncio.get_running_loop().create_future()
        self._post(self._dialect.reached)
        opened = False
        watch: asyncio.Task[None] | None = None
        try:
            self._outbox.put(await self._opening)
            call = stream_method(channel, self._dialect.service, self._dialect.method)(self._outbox.frames())
            watch = asyncio.create_task(end_unread(call, self._outbox, self._dialect.name, log), name="unread")
            async for frame in call:
                if not opened:
                    opened = True
                    backoff.connected()
                    self.let_in.set()
                    self._name_ours.set()
                    self._waiting = False
                    log.info("%s: connected to %s", self._dialect.name, self._address)
                self._dialect.take(frame)
            return "the stream was closed"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
            if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                self._name_taken(reason)
            return reason
        except asyncio.CancelledError:
            if cancelled_by_somebody():
                raise
            # By `end_unread`, or by gRPC, which cancels a call whose next frame cannot be made, and tells nobody why.
            return "the stream broke off"
        finally:
            if watch is not None:
                watch.cancel()
            self._outbox.close()
            self._post(self._dialect.down)

    def _name_taken(self, reason: str) -> None:
        """Give up if an instance that has not done anything yet has asked for long enough.

        One that was let in before goes on asking: it has work, and is the one that the name belongs to.
        """
        self._name_ours.clear()
        if self._follower is not None:
            self._follower._outbox.close()
        now_s = time.monotonic()
        self._taken_s = now_s if self._taken_s is None else self._taken_s
        if not self.let_in.is_set() and now_s - self._taken_s >= self._ask_s:
            raise NameTakenError(reason)

    def _say_waiting(self, reason: str) -> None:
        """Log, once per loss, that the peer is waited for."""
        if not self._waiting:
            self._waiting = True
            log.warning("%s: waiting for %s (%s)", self._dialect.name, self._address, reason)


def scheduler_link(
    address: str, access: Access, post: Callable[[m.Message], None], on_grant: Callable[[s.Grant], None]
) -> Link[s.WorkerToScheduler]:
    """Return the Credits link; `on_grant` gets each Grant, and tells the session."""

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
                post(m.DrainAsked("the scheduler asked for it"))
            elif kind == "undrain":
                post(m.UndrainAsked())
            else:
                log.warning("scheduler: a message of an unknown kind was ignored")

    return Link(
        address, access, Dialect("scheduler", m.SchedulerReached(), m.SchedulerDown(), SCHEDULER, "Credits", take), post
    )


def queue_link(
    address: str, access: Access, post: Callable[[m.Message], None], on_deliver: Callable[[q.Deliver], None]
) -> Link[q.WorkerToQueue]:
    """Return the Work link; `on_deliver` gets each Deliver, and tells the session."""

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

    return Link(address, access, Dialect("queue", m.QueueReached(), m.QueueDown(), QUEUE, "Work", take), post)
