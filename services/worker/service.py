"""The worker as a running service: parts put together, started, drained and stopped."""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import grpc

from penstock.exits import EX_CONFIG, EX_SOFTWARE
from services.clock import SystemClock
from services.life import say_ready
from services.rpc.names import NameTakenError
from services.rpc.server import Server, bind
from services.rpc.tls import security_of
from services.telemetry import Telemetry
from services.worker.core import messages as m
from services.worker.core.lifecycle import State
from services.worker.core.session import Session
from services.worker.core.sizing import Sizes
from services.worker.engine import ENGINE_END_S, Engine, EngineShape
from services.worker.gen_ai import RunSpans
from services.worker.links import Link, queue_link, scheduler_link
from services.worker.metrics import WorkerMetrics
from services.worker.name import Name
from services.worker.rendering import Rendering
from services.worker.runner import Identity, Runner
from services.worker.settings import PROGRAM, WorkerSettings

DEATH_GRACE_S = 5.0
"""After the engine's death: seconds to tell queue and scheduler, before the process ends without having told them."""

END_S = 2.0
"""Beyond the grace: seconds until the process has ended, as whoever would kill it is told in docs/configuration.md."""

FLUSH_S = END_S / 2
"""Of these, for what is handed back, and the last frames, to be taken; the rest is for the parts to close."""

EXIT_S = 0.5
"""Of these, for what is left of the process when its engine has ended, or has been killed."""

HALF_CLOSE_S = 0.2
"""For the end of the streams to leave where that has taken all of it: one peer may listen where the other does not."""

log = logging.getLogger("worker")


class Parts(NamedTuple):
    """What is made before the event loop runs."""

    make_engine: Callable[[], Engine]
    tokenizer: Rendering


def capacity_of(shape: EngineShape, watermark_blocks: int) -> int:
    """Return the blocks that may be booked. Raises SystemExit(78) if none are left."""
    capacity = shape.blocks_total - watermark_blocks
    if capacity < 1:
        print(
            f"{PROGRAM}: watermark_blocks is {watermark_blocks}, the engine has {shape.blocks_total} usable blocks: "
            "none would be left to book",
            file=sys.stderr,
        )
        raise SystemExit(EX_CONFIG)
    return capacity


def sizes_of(shape: EngineShape, capacity_blocks: int) -> Sizes:
    """Return what bounds a request on an engine of this shape."""
    return Sizes(
        capacity_blocks,
        shape.blocks_total,
        shape.block_size,
        shape.max_model_len,
        shape.lookahead_tokens,
        shape.default_max_tokens,
        shape.ceiling_max_tokens,
        shape.most_blocks,
    )


class Service:
    """One worker between its engine and its two peers."""

    def __init__(self, settings: WorkerSettings, engine: Engine, tokenizer: Rendering, telemetry: Telemetry):
        """Put the parts together; nothing runs yet."""
        shape = engine.shape
        worker_id = settings.the_worker_id()
        capacity = capacity_of(shape, settings.watermark_blocks)
        session = Session(sizes_of(shape, capacity), int(settings.engine_stall_s * 1e9))
        self._settings = settings
        self._session = session
        self._engine = engine
        self._tokenizer = tokenizer
        self.runner = Runner(
            Identity(worker_id, uuid.uuid4().hex, capacity),
            session,
            engine,
            tokenizer,
            SystemClock(),
            WorkerMetrics(session, capacity),
            RunSpans(telemetry, shape, worker_id),
        )
        self._name = Name()
        self._scheduler = scheduler_link(
            settings.scheduler_address, settings.access, self.runner.post, self.runner.grant_arrived, self._name
        )
        self._queue = queue_link(
            settings.queue_address, settings.access, self.runner.post, self.runner.deliver_arrived, self._name
        )
        self.runner.connect(self._scheduler, self._queue)
        log.info(
            "%s serves %s: %d blocks of %d tokens may be booked, window %d tokens",
            worker_id,
            shape.model,
            capacity,
            shape.block_size,
            shape.max_model_len,
        )

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> int:
        """Serve until `stop` or the engine's death; call `ready` with the port once grants are asked for.

        Return the exit status. Raises SystemExit(69) if the port cannot be had.
        """
        server = bind(self._settings.listen, [], _no_servicers, security_of(self._settings), self._settings.reflection)
        self._engine.start(self.runner.post, self.runner.died, self.runner.tokens_generated)
        await self._tokenizer.start(self.runner.tokenized, self.runner.tokenizer_died)
        loop = asyncio.get_running_loop()
        main = loop.create_task(self.runner.run(), name="runner")
        links = [
            loop.create_task(self._to_scheduler(server, ready), name="scheduler-link"),
            loop.create_task(self._to_queue(), name="queue-link"),
        ]
        waits = [loop.create_task(event.wait()) for event in (stop, self.runner.dead)]
        await asyncio.wait([main, *links, *waits], return_when=asyncio.FIRST_COMPLETED)
        grace_s = DEATH_GRACE_S if self.runner.dead_reason else self._settings.shutdown_grace_s
        end_s = loop.time() + grace_s + END_S
        status = await self._wind_down(stop.is_set(), [main, *links])
        for task in waits:
            task.cancel()
        await self._stop(server, [main, *links], end_s)
        return status

    async def _to_scheduler(self, server: Server, ready: Callable[[int], None]) -> None:
        """Be ready, and ask for grants, from when every tokenizer process can render."""
        await self._tokenizer.loaded()
        await server.start()
        ready(server.port)
        await self._scheduler.run()

    async def _to_queue(self) -> None:
        """Keep the Work stream open, from when the scheduler has let this instance in.

        Not before: the queue would take the leases of another instance of the same name whose stream has just broken.
        """
        await self._name.at_scheduler.let_in.wait()
        await self._queue.run()

    async def _wind_down(self, asked: bool, tasks: list[asyncio.Task[None]]) -> int:
        """Finish or hand back what is here; return the exit status."""
        if asked and not self.runner.dead_reason:
            log.info("draining: at most %g s", self._settings.shutdown_grace_s)
            self.runner.post(m.ShutdownAsked("the worker was asked to stop"))
            await self._until_idle(self._settings.shutdown_grace_s, tasks)
            self.runner.post(m.GraceOver())
            await self._until_idle(FLUSH_S, tasks)
            self._say_what_is_lost()
        else:
            await self._until_idle(DEATH_GRACE_S, tasks)
        failed = next((task for task in tasks if task.done()), None)
        if failed is None:
            return EX_SOFTWARE if self.runner.dead_reason else 0
        error = None if failed.cancelled() else failed.exception()
        if isinstance(error, NameTakenError):
            log.error("%s", error)
            return EX_CONFIG
        log.error("%s ended", failed.get_name(), exc_info=error)
        return EX_SOFTWARE

    def _say_what_is_lost(self) -> None:
        """Log how many requests have ended here without the queue knowing it."""
        unrecorded = self._session.states()[State.FINISHING]
        if unrecorded:
            log.error(
                "%d requests have ended here and the queue has not recorded it: they run again after their leases",
                unrecorded,
            )

    async def _until_idle(self, most_s: float, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until nothing is held, but no longer than `most_s` seconds or than all `tasks` run."""
        self.runner.idle.clear()
        self.runner.post(m.Tick())
        waiting = asyncio.create_task(self.runner.idle.wait())
        done, _ = await asyncio.wait([waiting, *tasks], timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            log.warning("something is still held after %g s", most_s)

    async def _stop(self, server: Server, tasks: list[asyncio.Task[None]], end_s: float) -> None:
        """Flush the streams, and stop every part, so that the process can have ended at `end_s` of the loop's time."""
        loop = asyncio.get_running_loop()
        main, *links = tasks
        streams: list[Link[Any]] = [self._scheduler, self._queue]
        flushing = [task for link, task in zip(streams, links, strict=True) if link.streaming]
        for link in streams:
            link.finish()
        if flushing:
            left_s = end_s - (END_S - FLUSH_S) - loop.time()
            await asyncio.wait(flushing, timeout=max(HALF_CLOSE_S, min(FLUSH_S, left_s)))
        for task in (main, *links):
            task.cancel()
        await asyncio.gather(main, *links, return_exceptions=True)
        await server.stop(0.2)
        await self._tokenizer.close()
        # One that makes no step does not hear that it is to end.
        left_s = 0.0 if self._session.watchdog.gave_up else end_s - EXIT_S - loop.time()
        await self._engine.close(max(0.0, min(ENGINE_END_S, left_s)))


def _no_servicers(_: grpc.aio.Server) -> None:
    """Add nothing: the worker is a client of both peers and serves health and reflection only."""


async def serve(
    settings: WorkerSettings, parts: Parts, announce: TextIO, stop: asyncio.Event, telemetry: Telemetry
) -> int:
    """Run the worker service until `stop` or its engine's death, `announce` it when ready; return the exit status."""
    service = Service(settings, parts.make_engine(), parts.tokenizer, telemetry)
    return await service.run(stop, lambda port: say_ready("worker", settings.listen, port, announce))
