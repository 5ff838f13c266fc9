"""The one loop that owns the machine: durable before visible, many requests to a sync.

A wake-up takes everything that is ready, but only so many submits, steps the machine
through it, writes all that follows in one synced batch, and only then releases the
effects; scheduler and workers are told some of them while it writes. What arrives
meanwhile gathers for the next batch: the slower the disk, the larger the batches.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.clock import Clock
from services.queue import wire
from services.queue.core.effects import Deliver, Effect, PutResult, Submitted, Write
from services.queue.core.entry import BatchKey
from services.queue.core.machine import Machine
from services.queue.core.messages import (
    Adopt,
    Cancel,
    Message,
    Submit,
    Tick,
)
from services.queue.core.open_class import mypyc_attr
from services.queue.items import Item, Lookup
from services.queue.outlet import ANSWERS, EARLY, FOR_SCHEDULER, FOR_WORKERS, Early, Outlet, Released
from services.queue.payloads import read_payloads
from services.queue.storage.health import StoreHealth
from services.queue.storage.loading import Loading
from services.queue.storage.read_faults import ReadFaults
from services.queue.storage.store import Store, StoreError, StoreUnusableError
from services.queue.submits.turns import Source, SubmitTurns

log = logging.getLogger(__name__)

SHORT_ROWS = 32
"""Rows of a short write: those of a few requests."""

SHORT_WRITE_NS = 5_000_000
"""After a short write that took no longer the next one is made on the loop's own thread. To hand a write over and back
takes two switches of threads, each of which waits for a processor on a busy machine, and a lone request has three
writes; who has so few has little else to do meanwhile. A disk that takes longer is left to the thread of the commits,
as is the first write, of which nothing is known, and a long one: while that syncs, the loop goes on."""

SHORT_READ_BYTES = 1024 * 1024
"""Of requests that are read on the loop's own thread for their delivery, from a disk whose short writes are made there
too: a millisecond or two. To read many requests at once, RocksDB's binding lets go of the interpreter's lock, so more
of them, or a slow disk, keep only the thread of the commits waiting."""

MAX_INBOX = 8192
"""Messages that wait for the loop before streams are read no further: about a second of work. As many may wait for a
store that is still being loaded."""

T = TypeVar("T")


class RefusedError(Exception):
    """The queue cannot write now. `disk_full` tells a full disk from a failing one."""

    def __init__(self, text: str, disk_full: bool, cause: Exception | None = None) -> None:
        """Refuse with `text`, for the client; `cause` is what a read raised, if one failed."""
        super().__init__(text)
        self.disk_full, self.__cause__ = disk_full, cause


@mypyc_attr(allow_interpreted_subclasses=True)
class Committer:
    """Owner of the machine. `post` and `ask` are called from the loop's own thread only."""

    def __init__(
        self,
        store: Store,
        build: Callable[[], Machine],
        clock: Clock,
        outlet: Outlet,
        disk_free_min_bytes: int,
        loading: Loading | None = None,
        machine: Machine | None = None,
        faults: ReadFaults | None = None,
    ) -> None:
        """Own the machine that `build` makes from all that the store holds.

        With `loading`, own `machine`, which knows the first of it, and let it adopt the rest while submits are served.
        """
        self._store = store
        self._build = build
        self._clock = clock
        self._outlet = outlet
        self.health = StoreHealth(store, clock, disk_free_min_bytes)
        self.machine = machine or build()
        self._faults = faults or ReadFaults()
        self._loading = loading
        self._page: asyncio.Future[Adopt | None] | None = None
        """The next requests of the store, being read."""
        self.loaded = asyncio.Event()
        """Set once the machine knows everything that the store holds, or has to be built of it anew."""
        if loading is None:
            self.loaded.set()
        self._last_short_ns = SHORT_WRITE_NS + 1
        """How long the last short write took."""
        self._began_ns = 0
        """Since when the batch that is under way is being handled; 0 if none is."""
        self._inbox: list[Item] = []
        self._tick: Tick | None = None
        """One that is due. What came while a slow disk was written is heard first: it may be what renews a lease."""
        self._tick_waited = False
        """Whether it waits for a second batch, with what did not fit into the one before it."""
        self._submits: SubmitTurns[Item] = SubmitTurns()
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False
        self._tickets = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._disk = ThreadPoolExecutor(1, "commit")
        """One thread: writes are in order, and lookups see all of them."""

    # ---- what servicers call ----

    def post(self, item: Item) -> None:
        """Have `item` handled in the next batch, a Tick at its end."""
        if isinstance(item, Tick):
            self._tick = item
        elif isinstance(item, Cancel) and item.request_ids is None and self._submits:
            # What was submitted to the batch before is stored first; who knows a name was told it when it was stored.
            self._submits.put_behind(item.batch, item)
        else:
            self._inbox.append(item)
        if len(self._inbox) >= MAX_INBOX:
            self._room.clear()
        self._ready.set()

    async def room(self, submits: bool = False) -> None:
        """Wait until the inbox has room; readers of streams call this before each frame.

        Anything but `submits` waits for the store to be loaded, too, once enough else does.
        """
        await self._room.wait()
        if self._loading is not None and self._loading.held >= MAX_INBOX and not submits:
            await self.loaded.wait()

    async def ask(self, make: Callable[[int], Item]) -> Any:
        """Post the item that `make` builds for a ticket, return its durable answer; raises RefusedError."""
        if self._loading is not None:
            await self.room()  # of callers who give up meanwhile, and come again, nothing would end
        return await self.promise(make)

    def promise(self, make: Callable[[int], Item]) -> asyncio.Future[Any]:
        """Post the item that `make` builds for a ticket; the future gets its durable answer, or RefusedError."""
        ticket, answer = self._expect()
        self.post(make(ticket))
        return answer

    def submit(
        self, source: Source, weight: int, make: Callable[[int], Item], batches: Collection[BatchKey] = ()
    ) -> asyncio.Future[Submitted]:
        """Have the submit that `make` builds for a ticket committed when it is the turn of `source`.

        Its `weight` is in small requests; `batches` are those that its requests belong to. The future gets its durable
        answer, or RefusedError.
        """
        ticket, answer = self._expect()
        self._submits.put(source, weight, make(ticket), batches)
        self._ready.set()
        return answer

    def commit_age_s(self) -> float:
        """Return how long the batch under way has taken so far, its reads as well; 0 if none is. Any thread may ask."""
        began_ns = self._began_ns
        return (self._clock.now_ns() - began_ns) / 1e9 if began_ns else 0.0

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        ticket = next(self._tickets)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        return ticket, answer

    # ---- the loop ----

    async def run(self) -> None:
        """Handle batches until `stop`; then handle what is left and return."""
        if self._loading is not None:
            self._read_on(self._loading)
        while not (self._stopping and not self._inbox and not self._submits):
            await self._ready.wait()
            self._ready.clear()
            items = self._gathered()
            self._room.set()
            self._began_ns = self._clock.now_ns()
            if self._loading is not None:
                items = self._loading.admit(items)
                await self._load(self._loading)
            if items:
                await self._handle(items)
            self._began_ns = 0
            if self._submits or self._tick_waited:
                self._ready.set()
                await asyncio.sleep(0)  # a short commit is written on this thread: let readers and answers go on
        if self._page is not None:
            await asyncio.wait([self._page])
        self._disk.shutdown()

    def _gathered(self) -> list[Item]:
        """Return what the next batch handles: all that has come, but only so many submits."""
        items, self._inbox = self._inbox, []
        items += self._submits.take(all_of_it=self._stopping)
        if self._tick is None:
            return items
        if not self._room.is_set() and not self._tick_waited:
            # Readers have waited for room with what they have read; once, for it may be so each time.
            self._tick_waited = True
            return items
        items.append(self._tick)
        self._tick, self._tick_waited = None, False
        return items

    def _read_on(self, loading: Loading) -> None:
        # Not on the thread of the commits: one reads while the other waits for its sync.
        self._page = asyncio.get_running_loop().run_in_executor(None, loading.read)
        self._page.add_done_callback(lambda _: self._ready.set())

    async def _load(self, loading: Loading) -> None:
        """Take in what has been read of the store, and have it read on."""
        if self._page is None or not self._page.done():
            return
        adopt = self._page.result()
        if adopt is None:
            self._end_loading()
            return
        self._read_on(loading)
        await self._commit([adopt])
        # What lives long is not worth looking at for garbage, and pauses for that grow with the backlog.
        gc.freeze()

    def _end_loading(self) -> None:
        if self._loading is not None:
            self._inbox = [*self._loading.take_held(), *self._inbox]
            self._loading = None
            self._ready.set()
            self.loaded.set()

    def stop(self) -> None:
        """Let `run` end after what has been posted."""
        self._stopping = True
        self._ready.set()

    async def _handle(self, items: Sequence[Item]) -> None:
        self.health.notice_failure()
        if self.health.notice_little_room():
            await self._rebuild()  # which ends the streams: what workers say from now on waits with them
        if self.health.broken:
            await self._heal(items)  # before anything is looked up: rows may come and go with it
        messages = await self._look_up(items)
        if self.health.broken:
            messages = self._readable(messages)
        messages = self._admit(messages)
        failure = None
        try:
            await self._commit(messages)
        except StoreError as error:
            failure = error
        if failure is not None:
            await self._fail(messages, failure)

    async def _look_up(self, items: Sequence[Item]) -> Sequence[Message]:
        # No batch is being written now: what is looked at here and below is the same store.
        items = [item.glance(self._store) or item if isinstance(item, Lookup) else item for item in items]
        if not any(isinstance(item, Lookup) for item in items):
            return items  # type: ignore[return-value]  # no Lookup is left
        found = await self._off_loop(lambda: [self._read(item) for item in items])
        # Only what cannot be read is refused: a worker's claim that came with it must not go unanswered.
        for item, error in zip(items, found, strict=True):
            if isinstance(error, Exception):
                self._refuse([item], RefusedError(f"the store cannot be read: {error}", False, error))
        return [message for message in found if not isinstance(message, Exception)]

    def _read(self, item: Item) -> Message | Exception:
        try:
            return item.read(self._store) if isinstance(item, Lookup) else item
        except StoreError as error:
            self._faults.note(error)
            return error
        except Exception as defect:
            # Nothing has been stepped yet: what one caller asked for ends nobody else's batch.
            log.exception("a look into the store failed")
            return defect

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _admit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Refuse the submits among `messages` if the disk is too full, or is not there."""
        if not any(isinstance(message, Submit) for message in messages):
            return messages
        self.health.check_disk()
        if not (refusal := self.health.refusal()):
            return messages
        self._refuse([m for m in messages if isinstance(m, Submit)], RefusedError(refusal, self.health.is_disk_full))
        return [m for m in messages if not isinstance(m, Submit)]

    async def _commit(self, messages: Sequence[Message]) -> None:
        now_ns = self._clock.now_ns()
        everything = [effect for message in messages for effect in self.machine.step(message, now_ns)]
        sealed = self.machine.seal()
        rows = [effect for effect in everything if type(effect) is Write or type(effect) is PutResult]
        said = [effect for effect in everything if type(effect) is not Write]
        told = await self._foretell(said)
        if rows:
            rows.append(sealed.counters)
            await self._written(rows, told)
            self._outlet.observe_commit(len(messages), (self._clock.now_ns() - now_ns) / 1e9)
        self._release(Released([effect for effect in said if type(effect) not in EARLY], sealed.progress))

    async def _foretell(self, said: Sequence[Effect]) -> bool:
        """Say what of it need not wait; return whether there was anything."""
        early = [effect for effect in said if type(effect) in EARLY]
        if not early:
            return False
        for_workers = [effect for effect in early if type(effect) in FOR_WORKERS]
        for_scheduler = [effect for effect in early if type(effect) in FOR_SCHEDULER]
        deliveries = [effect for effect in for_workers if type(effect) is Deliver]
        stored = [delivery for delivery in deliveries if delivery.payload is None]
        wanted = [delivery.seq for delivery in stored]
        size_bytes = sum(delivery.meta.payload_bytes for delivery in stored)
        if wanted and (size_bytes > SHORT_READ_BYTES or self._last_short_ns > SHORT_WRITE_NS):
            payloads = await self._off_loop(lambda: read_payloads(self._store, wanted))
        else:
            payloads = read_payloads(self._store, wanted)
        self._outlet.foretell(Early(for_workers, payloads, for_scheduler))
        return True

    async def _written(self, rows: list[Write | PutResult], told: bool) -> None:
        """Write `rows` where it costs least; `told`: something was said early."""
        short = len(rows) <= SHORT_ROWS
        if short and self._last_short_ns <= SHORT_WRITE_NS:
            if told:
                await asyncio.sleep(0)  # the writers of the streams go first: this thread is about to be held up
            if self._write(rows, short, False):
                return  # else nothing of it is written: whatever has to be waited for, the loop goes on meanwhile
        await self._off_loop(lambda: self._write(rows, short, True))

    def _write(self, rows: list[Write | PutResult], short: bool, waits: bool) -> bool:
        """Return whether `rows` are written, which they are with `waits`; raises StoreError."""
        began_ns, is_written = self._clock.now_ns(), True
        try:
            # In the order of the steps: a dead letter may be revived, and its result deleted, in the batch it died in.
            writes = [wire.result_write(row) if isinstance(row, PutResult) else row for row in rows]
            if waits:
                self._store.write(writes)
            else:
                is_written = self._store.write_at_once(writes)
            return is_written
        finally:
            if is_written:  # or failed
                took_ns = self._clock.now_ns() - began_ns
                self._submits.wrote(took_ns)
                if short:
                    self._last_short_ns = took_ns

    def _release(self, released: Released) -> None:
        # Streams first: a request's way to its worker goes on while its client is being answered.
        self._outlet.release(released)
        for effect in released.effects:
            if type(effect) in ANSWERS:
                answer = self._answers.pop(effect.ticket, None)  # type: ignore[union-attr]  # answers have a ticket
                if answer is not None and not answer.done():
                    answer.set_result(effect)

    # ---- when the store fails ----

    async def _fail(self, messages: Sequence[Message], error: StoreError) -> None:
        """Forget the batch: what the disk holds is the truth, so the machine is built from it anew."""
        self.health.failed(error)
        self._refuse(messages, RefusedError(self.health.broken, False))
        await self._rebuild()

    async def _heal(self, items: Sequence[Item]) -> None:
        if not any(isinstance(item, Tick) for item in items) or not self.health.is_probe_due():
            return
        try:
            await self._off_loop(self.health.probe)
        except StoreError as error:
            self.health.still_fails(error)
            return
        if await self._rebuild():
            self.health.mended()

    async def _rebuild(self) -> bool:
        self._end_loading()  # the machine is built of the whole store: now, or once that can be read
        old = self.machine
        try:
            self.machine = await self._off_loop(self._built)
        except (StoreError, StoreUnusableError) as error:
            log.error("the store cannot be read either: %s", error)
            self.health.built(False)
            return False
        self.machine.book.counters.go_on_from(old.book.counters)
        old.end()
        self.health.built(True)
        self._outlet.reset(self.machine)
        return True

    def _built(self) -> Machine:
        self._store.wait_durable()  # what a sync that failed was about must not become what the machine knows
        return self._build()

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        """While the store cannot write, keep only what changes nothing in it."""
        refused = [message for message in messages if not self.health.serves(message)]
        self._refuse(refused, RefusedError(self.health.broken, False))
        return [message for message in messages if self.health.serves(message)]

    def _refuse(self, items: Sequence[Item], error: RefusedError) -> None:
        for item in items:
            answer = self._answers.pop(getattr(item, "ticket", 0), None)
            if answer is not None and not answer.done():
                answer.set_exception(error)
