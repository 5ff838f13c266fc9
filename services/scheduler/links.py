"""The scheduler's stream to the queue: kept open, opened again when it breaks."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

from penstock.queue.v1 import queue_pb2
from penstock.tls import Access
from services.rpc.backoff import Backoff
from services.rpc.limits import CHANNEL_OPTIONS
from services.rpc.outbox import Outbox
from services.rpc.peer_stream import Ending, run_stream
from services.rpc.streams import StreamMethod, stream_method
from services.scheduler import wire
from services.scheduler.core.messages import QueueOpened

SERVICE = queue_pb2.DESCRIPTOR.services_by_name["QueueService"]

log = logging.getLogger("scheduler")


class Listener(Protocol):
    """Who hears what the queue says: the runner."""

    def workers(self) -> int:
        """Return how many workers are connected, which decides between two schedulers."""

    def open_queue(self, outbox: Outbox) -> None:
        """The queue's stream is open, and `outbox` says things to it."""

    def close_queue(self) -> None:
        """It has ended."""

    def feed(self, messages: Iterable[Any]) -> None:
        """Hear messages, in order."""


class BacklogLink:
    """Keeps one Backlog stream open and feeds what it says to the runner. Logs changes of state, not retries."""

    def __init__(self, address: str, name: str, runner: Listener, access: Access) -> None:
        """Connect to the queue at `address`, calling ourselves `name`."""
        self._address = address
        self._access = access
        self._name = name
        self._instance_id = uuid.uuid4().hex
        self._runner = runner
        self._backoff = Backoff()
        self._logged: object = None
        """The kind of ending that was logged last, None since a connection."""

    async def run(self) -> None:
        """Open the stream again and again until cancelled."""
        async with self._access.open(self._address, CHANNEL_OPTIONS) as channel:
            backlog = stream_method(channel, SERVICE, "Backlog")
            while True:
                ending = await self._serve(backlog)
                if ending.kind != self._logged:
                    self._logged = ending.kind
                    log.warning("waiting for the queue at %s: %s", self._address, ending.text)
                await asyncio.sleep(self._backoff.next_s())

    async def _serve(self, backlog: StreamMethod) -> Ending:
        """Run one stream to its end; return why it ended."""
        outbox = Outbox()
        outbox.put(wire.backlog_open(self._name, self._instance_id, self._runner.workers()))
        opened = False

        def take(frame: queue_pb2.BacklogResponse) -> None:
            nonlocal opened
            messages = [wire.from_queue(message) for message in frame.messages]
            if not opened and messages:
                self._check_first(messages[0])
                self._runner.open_queue(outbox)
                opened = True
            self._runner.feed(messages)

        try:
            return await run_stream(backlog, outbox, "the queue", log, take)
        except wire.InvalidFieldError as fault:
            return Ending("protocol", f"it broke the protocol: {fault}")
        finally:
            if opened:
                self._runner.close_queue()

    def _check_first(self, message: object) -> None:
        """Note the connection; raises wire.InvalidFieldError if the stream does not begin as it should."""
        if not isinstance(message, QueueOpened):
            raise wire.InvalidFieldError("open: the first message must be `open`")
        self._backoff.connected()
        self._logged = None
        log.info("connected to the queue at %s", self._address)
