"""The queue: the production committer around the production machine, on a disk that takes its time and may fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from services.queue import wire
from services.queue.committer import SHORT_WRITE_NS, Committer
from services.queue.core import effects as e
from services.queue.core import messages as m
from services.queue.core import records
from services.queue.core.entry import Entry, Recovered
from services.queue.core.lifecycle import Input, Outcome
from services.queue.core.machine import Machine
from services.queue.core.workers import Rules
from services.queue.outlet import Early, Released
from services.queue.storage.loading import Loading
from services.queue.storage.reader import Reader
from services.queue.storage.recovery import Recovery, recover, store_id_of
from services.queue.storage.store import StoreError, StoreUnusableError
from services.queue.submits.turns import SUBMITS_AT_ONCE
from services.queue.watch.hub import WatchHub
from tests.simulation.coverage import Coverage
from tests.simulation.durable import STORE_ID, Durable
from tests.simulation.network import UP, Network, Stream
from tests.simulation.plan import CHANNELS, Options
from tests.simulation.referee import QueueReferee
from tests.simulation.store import LEAST_FREE_BYTES, SimStore
from tests.simulation.watch_server import WatchServer
from tests.simulation.world import MS, Process, World

TICK_NS = 50 * MS
RESTART_NS = 80 * MS
WORKER_GRACE_NS = 300 * MS


class Disk:
    """Work for the disk; whoever awaits it gets what it returns or raises, some virtual time later."""

    def __init__(self, work: Callable[[], Any]) -> None:
        """Plan `work`."""
        self.work = work

    def __await__(self) -> Generator[Disk, Any, Any]:
        """Hand the work to the actor and wait for it."""
        return (yield self)


class Answer:
    """Takes the place of the future that a servicer would await."""

    def __init__(self, told: Callable[[Any], None], refused: Callable[[], None]) -> None:
        """Call one of the two."""
        self.set_result = told
        self._refused = refused

    def done(self) -> bool:
        """Return False: it is asked right before it is set."""
        return False

    def set_exception(self, _error: Exception) -> None:
        """Take a refusal."""
        self._refused()


class Page:
    """Takes the place of the future of a page of the store, being read at start-up."""

    found: Any = None
    error: Exception | None = None
    read = False

    def done(self) -> bool:
        """Return whether it has been read."""
        return self.read

    def result(self) -> Any:
        """Return what was read, or raise what reading raised."""
        if self.error is not None:
            raise self.error
        return self.found


class SimCommitter(Committer):
    """The production committer; only its way to the disk's threads and its futures are others."""

    actor: QueueActor
    committing = False

    async def _off_loop(self, work: Callable[[], Any]) -> Any:
        return await Disk(work)

    async def _written(self, rows: list[Any], told: bool) -> None:
        # Also a short write takes its time, in which the queue may crash. The disk is called slow and fast by turns.
        self._last_short_ns = 2 * SHORT_WRITE_NS + 1 - self._last_short_ns
        await Disk(lambda: self._write(rows, False, True))

    async def _commit(self, messages: Sequence[m.Message]) -> None:
        self.committing = True
        try:
            await super()._commit(messages)
        finally:
            self.committing = False

    def ask_for(self, source: int, make: Callable[[int], Any], answer: Answer) -> None:
        """Post the item that `make` builds for a ticket, a submit in its turn, and have `answer` told."""
        ticket = next(self._tickets)
        try:
            item = make(ticket)
        except StoreError as error:  # what the servicer reads before it asks
            answer.set_exception(error)
            return
        self._answers[ticket] = answer  # type: ignore[assignment]
        if isinstance(item, m.Submit) or getattr(item, "submits", False):
            self._submits.put(
                ("t", source), SUBMITS_AT_ONCE // 2, item
            )  # so heavy that often some wait for the next batch
        else:
            self.post(item)

    def take_items(self) -> list[Any]:
        """Return what has gathered, as the committer's loop does at a wake-up."""
        return self._gathered()

    async def turn(self, items: Sequence[Any]) -> None:
        """Do what one turn of `run` does."""
        if self._loading is not None:
            items = self._loading.admit(items)
            await self._load(self._loading)
        if items:
            await self._handle(items)

    @property
    def has_page(self) -> bool:
        """Whether a page of the store waits to be taken in."""
        return self._loading is not None and (self._page is None or self._page.done())

    def begin_loading(self) -> None:
        """Do what `run` does first."""
        if self._loading is not None:
            self._read_on(self._loading)

    def _read_on(self, loading: Loading) -> None:
        page = Page()
        self._page = page  # type: ignore[assignment]
        self.actor.read_page(page, loading)

    def _end_loading(self) -> None:
        super()._end_loading()
        self.actor.loaded()


class WatchedMachine(Machine):
    """The production machine under the referee's eyes."""

    referee: QueueReferee
    coverage: Coverage
    loading: Callable[[], bool]

    def step(self, message: m.Message, now_ns: int) -> list[e.Effect]:
        """Step, and have the step checked."""
        self.coverage.queue_message(message, self.loading())
        effects = super().step(message, now_ns)
        self.referee.stepped(message, effects)
        return effects

    def _stop(self, entry: Entry, event: Input, outcome: Outcome, now_ns: int) -> bool:
        self.coverage.happened(event.value, entry.name)
        return super()._stop(entry, event, outcome, now_ns)


class QueueActor(Process):
    """Runs the committer; what is not on disk when it crashes is gone."""

    def __init__(self, world: World, net: Network, options: Options, coverage: Coverage) -> None:
        """Start with an empty store."""
        super().__init__(world, "queue")
        self.net = net
        self.coverage = coverage
        self.durable = Durable(options.max_attempts)
        self.referee = QueueReferee(self.durable)
        self.store = SimStore(self.durable.batch)
        self.reader = Reader(self.store, STORE_ID)
        self._sync_ns = options.sync_ms * MS
        self._rules = Rules(
            CHANNELS,
            options.max_attempts,
            options.lease_ms * MS,
            WORKER_GRACE_NS,
            options.max_inflight,
            options.keepalive_ms * MS,
        )
        self.streams: dict[int, Stream] = {}
        self.hub = WatchHub()
        self.watches: dict[int, WatchServer] = {}
        self._numbers = itertools.count(1)
        self._disk: Disk | None = None
        self.crash_in_write: bool | None = None
        """Whether to die in the next write, and then whether that write is kept."""
        self.committer: SimCommitter

    @property
    def machine(self) -> Machine:
        """The machine in charge."""
        return self.committer.machine

    @property
    def quiet(self) -> bool:
        """Whether everything is on disk."""
        return self.up and self._disk is None and not self.committer.health.broken and self.committer.loaded.is_set()

    # ---- life ----

    def boot(self) -> None:
        """Recover from the store and serve; a store that cannot be read ends the process, to be started again."""
        try:
            self.store.reopen()
            recovery = Recovery(self.store)
            recovery.pass_numbers_over()
            store_id_of(self.store, lambda: STORE_ID)
            loading = Loading(recovery)
        except (StoreError, StoreUnusableError):
            self.stop(RESTART_NS)
            return
        machine = self._machine(loading.first)
        self.committer = SimCommitter(self.store, self._build, self.world, self, LEAST_FREE_BYTES, loading, machine)
        self.committer.actor = self
        self.referee.took_over(machine)
        self.committer.begin_loading()
        self._tick(self.world.now_ns(), 0)

    def _machine(self, recovered: Recovered) -> Machine:
        machine = WatchedMachine(STORE_ID, self._rules, recovered, self.world.now_ns())
        machine.referee = self.referee
        machine.coverage = self.coverage
        machine.loading = lambda: not self.committer.loaded.is_set()
        return machine

    def _build(self) -> Machine:
        machine = self._machine(recover(self.store))
        self.referee.took_over(machine)
        return machine

    def read_page(self, page: Page, loading: Loading) -> None:
        """Read on in the store, on a thread of its own."""
        self.timer(self.world.draw_ns(self._sync_ns), self._read_page, page, loading)

    @staticmethod
    def _read_page(page: Page, loading: Loading) -> None:
        try:
            page.found = loading.read()
        except (StoreError, StoreUnusableError) as error:
            page.error = error
        page.read = True

    def loaded(self) -> None:
        """Hold the machine against the store, now that it must know all of it."""
        if not self.committer.health.broken:  # a machine in doubt is built anew before anything else
            self.referee.knows_all()

    def died(self) -> None:
        """Lose everything but the store."""
        self.streams.clear()
        self.hub = WatchHub()
        self.watches.clear()
        self._disk = None
        self.crash_in_write = None

    def crash(self, kept: bool) -> None:
        """kill -9; `kept` if a write in progress has reached the disk all the same."""
        if self._disk is not None and kept:
            try:
                self._disk.work()
            except (StoreError, StoreUnusableError):
                self.world.note("queue: the write in progress failed")
        self.net.kill(self, kept)
        self.stop(RESTART_NS)

    def _tick(self, due_ns: int, calm_ns: int) -> None:
        """Do what the clockwork does: after a standstill no tick comes until workers have had time to return."""
        now_ns = self.world.now_ns()
        if now_ns - due_ns > TICK_NS:
            self.committer.post(m.StoodStill(now_ns - due_ns + TICK_NS))
            calm_ns = now_ns + WORKER_GRACE_NS
        if now_ns >= calm_ns:
            self.committer.post(m.Tick(now_ns))
        self.timer(TICK_NS, self._tick, now_ns + TICK_NS, calm_ns)

    # ---- the committer's loop ----

    def woke(self) -> None:
        """Begin a batch if none is in progress."""
        if self._disk is None:
            items = self.committer.take_items()
            if items or self.committer.has_page:
                self._drive(self.committer.turn(items), lambda batch: batch.send(None))

    def _drive(self, batch: Coroutine[Disk, Any, None], go: Callable[[Coroutine[Disk, Any, None]], Disk]) -> None:
        try:
            self._disk = go(batch)
        except StopIteration:
            self._disk = None
            self.woke()
            return
        except (StoreError, StoreUnusableError) as error:
            # Nothing but a page that could not be read at start-up gets here: the service ends.
            self.world.note("queue: cannot load its store:", error)
            self.crash(False)
            return
        if self.crash_in_write is not None and self.committer.committing:
            kept = self.crash_in_write
            self.coverage.fault(f"queue crash in a write, {'kept' if kept else 'lost'}")
            self.world.note("queue: crashes in a write,", "kept" if kept else "lost")
            self.crash(kept)
            return
        self.timer(self.world.draw_ns(self._sync_ns), self._disk_done, batch, self._disk)

    def _disk_done(self, batch: Coroutine[Disk, Any, None], disk: Disk) -> None:
        try:
            found = disk.work()
        except (StoreError, StoreUnusableError) as error:
            failure = error
            self._drive(batch, lambda b: b.throw(failure))
        else:
            self._drive(batch, lambda b: b.send(found))

    # ---- the committer's outlet ----

    def foretell(self, early: Early) -> None:
        """Say what need not wait for its batch to be durable."""
        self.referee.foretold(early)
        for effect in (*early.for_workers, *early.for_scheduler):
            if type(effect) is e.Deliver and effect.payload is None and effect.seq not in early.payloads:
                self._deliver_late(effect)
            else:
                self._say(effect)

    def _deliver_late(self, effect: e.Deliver) -> None:
        """Do what the speaker does for a request that was not read with its batch."""
        try:
            found = self.store.get(records.PAYLOADS, records.seq_key(effect.seq)) is not None
        except StoreError:
            self._end(effect.stream)
            return
        self._say(effect if found else e.Refused(effect.stream, effect.lease.request_id, e.RefusedReason.ENDED))

    def release(self, released: Released) -> None:
        """Say what a durable batch says."""
        self.referee.released(released.effects)
        ended = set()
        for effect in released.effects:
            if type(effect) is e.Ended:
                ended.add(effect.meta.batch)
                self.hub.ended(effect.seq, effect.meta.batch_key, effect.request_id, wire.told_result(effect))
                self.world.note("queue:", effect.request_id, "ended", effect.outcome.name, "after", effect.attempts)
            elif isinstance(effect, e.EndStream | e.NameTaken):
                self._end(effect.stream)
            elif hasattr(effect, "stream"):
                self._say(effect)
        for watch in self.watches.values():
            if watch.batch in ended:
                watch.look()

    def _say(self, effect: Any) -> None:
        stream = self.streams.get(effect.stream)
        if stream is not None:
            self.world.note("queue says", effect)
            stream.down(effect)

    def _end(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.close(UP)
            self.committer.post(m.WorkerClosed(number))
            self.committer.post(m.BacklogClosed(number))

    def reset(self, _machine: Machine) -> None:
        """End the streams of workers and scheduler after the machine was built anew; watches stay."""
        self.world.note("queue: the store failed, starting over")
        self.referee.knows_all()
        for number in list(self.streams):
            self._end(number)
        self.hub.reset({})
        for watch in self.watches.values():
            watch.renew()
            watch.look()

    def observe_commit(self, messages: int, seconds: float) -> None:
        """Measure nothing."""

    # ---- streams ----

    def accept(self, stream: Stream) -> int | None:
        """Take in a Work or Backlog stream, unless the store is broken; return its number."""
        if self.committer.health.broken:
            return None
        number = next(self._numbers)
        self.streams[number] = stream
        stream.hear[UP] = lambda message: self.post(self._heard, message)
        stream.over[UP] = lambda: self.post(self._over, number)
        return number

    def _heard(self, message: m.Message) -> None:
        self.world.note("queue hears", message)
        self.committer.post(message)

    def _over(self, number: int) -> None:
        self.streams.pop(number, None)
        self.committer.post(m.WorkerClosed(number))
        self.committer.post(m.BacklogClosed(number))

    def accept_calls(self, stream: Stream) -> None:
        """Take in a client's calls: what makes an item, and the name its answer is to have."""
        source = next(self._numbers)
        stream.hear[UP] = lambda call: self.post(self._call, source, stream, *call)

    def _call(self, source: int, stream: Stream, name: object, make: Callable[[int], Any]) -> None:
        answer = Answer(lambda told: stream.down((name, told)), lambda: stream.down((name, None)))
        self.committer.ask_for(source, make, answer)

    def accept_watch(self, stream: Stream) -> None:
        """Take in a Watch stream; its first message says what it watches."""
        number = next(self._numbers)
        stream.hear[UP] = lambda said: self.post(self._watch, number, stream, said)
        stream.over[UP] = lambda: self.post(self.end_watch, number)

    def _watch(self, number: int, stream: Stream, said: tuple[str, int, bool] | None) -> None:
        if not self.committer.loaded.is_set():
            self.timer(TICK_NS // 10, self._watch, number, stream, said)
        elif said is not None:
            self.watches[number] = WatchServer(self, number, stream, *said)
        elif number in self.watches:
            self.watches[number].taken()

    def end_watch(self, number: int) -> None:
        """Forget a watch that is over."""
        watch = self.watches.pop(number, None)
        if watch is not None:
            watch.ended()
            watch.stream.close(UP)
