"""One simulated life of a fleet: faults first, then health, then everything must have ended."""

from __future__ import annotations

import gc
from unittest.mock import patch

from services.queue.core.lifecycle import State
from services.queue.storage import loading, recovery
from tests.simulation.client_actor import ClientActor
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults
from tests.simulation.network import Network
from tests.simulation.plan import Plan
from tests.simulation.queue_actor import QueueActor
from tests.simulation.scheduler_actor import SchedulerActor
from tests.simulation.worker_actor import WorkerActor
from tests.simulation.world import MS, START_NS, BrokenPromiseError, Process, World, demand

MOST_EVENTS = 300_000
HEAL_NS = 60_000 * MS
"""Virtual time the healed fleet gets to end everything: leases expire within 2 s of it, attempts are at most 3."""

PAGE_REQUESTS = 2
"""Requests of a page of the store, so that the few there are make a start long."""

ROUNDS_NS = 500 * MS
"""An operator looks this often for workers that are still drained, and restarts them or takes it back."""


class Simulation:
    """A fleet under one plan."""

    def __init__(self, plan: Plan, verbose: bool = False) -> None:
        """Put the fleet together; keep a transcript if `verbose`."""
        options = plan.options
        self.plan = plan
        self.world = World(options.seed, verbose)
        self.coverage = Coverage()
        self.net = Network(self.world, options.most_delay_ms * MS, options.keepalive_ms * MS)
        self.queue = QueueActor(self.world, self.net, options, self.coverage)
        self.store = self.queue.store
        self.scheduler = SchedulerActor(self.world, self.net, self.queue, options.policy)
        self.workers = [
            WorkerActor(self.world, self.net, f"w{i}", self.queue, self.scheduler, options, self.coverage)
            for i in range(options.workers)
        ]
        self.clients = [ClientActor(self.world, self.net, i, plan, self.queue) for i in range(options.clients)]
        self.coverage.bind(self)
        self._healed = False

    @property
    def processes(self) -> tuple[Process, ...]:
        """Every process."""
        return (self.queue, self.scheduler, *self.workers, *self.clients)

    def run(self) -> Coverage:
        """Play it; return what met what. Raises BrokenPromiseError, or what a core raises."""
        with (
            patch.object(loading, "FIRST_REQUESTS", PAGE_REQUESTS),
            patch.object(recovery, "PAGE_ROWS", PAGE_REQUESTS),
            patch.object(gc, "freeze", lambda: None),  # one process plays many fleets, whose garbage must go
        ):
            return self._run()

    def _run(self) -> Coverage:
        for process in self.processes:
            process.start()
        Faults(self).plan()
        self.world.after(self.plan.options.fault_window_ms * MS, self._heal)
        deadline_ns = START_NS + self.plan.options.fault_window_ms * MS + HEAL_NS
        while not (self._healed and self._all_ended()):
            if self.world.now_ns() > deadline_ns or self.world.events > MOST_EVENTS:
                raise BrokenPromiseError(f"not everything ended: {self._left()}")
            demand(self.world.step(), "nothing is left to do, and not everything has ended")
        self._check_end()
        return self.coverage

    # ---- the second phase ----

    def _heal(self) -> None:
        """End every fault: from here on everything must end."""
        self.world.note("---- the faults are over ----")
        self._healed = True
        self.net.heal()
        self.store.heal()
        self.queue.crash_in_write = None
        for process in self.processes:
            process.resume()
        for worker in self.workers:
            worker.healed = True
            if worker.up and not worker.engine.trusts:
                worker.crash(False)
            elif worker.up:
                worker.engine.failing_share = worker.engine.preempting_share = 0.0
        self._rounds()

    def _rounds(self) -> None:
        for worker in self.workers:
            if worker.up and not worker.session._held.open:
                worker.shut_down()
        if self.scheduler.up:
            for view in self.scheduler.machine.fleet:
                if view.draining:
                    self.scheduler.drain(view.worker_id, True)
        self.world.after(ROUNDS_NS, self._rounds)

    # ---- the end ----

    def _all_ended(self) -> bool:
        return (
            all(client.done for client in self.clients)
            and all(process.up for process in self.processes)
            and self.queue.quiet
            and all(entry.state is State.DEAD for entry in self.queue.machine.book.entries.values())
            and all(worker.session.idle and not worker.ending for worker in self.workers)
            and self._all_home()
        )

    def _all_home(self) -> bool:
        fleet = list(self.scheduler.machine.fleet)
        drains = {worker.name: worker.session._held.drain for worker in self.workers}
        return len(fleet) == len(self.workers) and all(
            worker.closed_ns is None
            and worker.ledger.free_blocks == worker.shape.capacity_blocks
            and worker.drain == drains[worker.worker_id]
            for worker in fleet
        )

    def _left(self) -> str:
        if not self.queue.up or not self.scheduler.up:
            return "queue or scheduler does not come up"
        entries = [f"{e.seq}:{e.state.name}" for e in self.queue.machine.book.entries.values()]
        ledgers = {
            w.worker_id: (sorted(w.ledger), w.ledger.free_blocks, w.closed_ns) for w in self.scheduler.machine.fleet
        }
        waiting = {e.request_id[-4:]: e.state.name for e in self.scheduler.machine.backlog.entries()}
        held = {
            w.name: [(e.request_id[-4:], e.state.name) for e in w.session._held.by_request.values()]
            for w in self.workers
            if w.up
        }
        clients = {
            c.name: [key for key in c.wanted if key not in c.read or c.read[key].to_delete] for c in self.clients
        }
        return (
            f"queue {entries} {self.queue.committer.health.broken}; ledgers {ledgers}; backlog {waiting}; "
            f"sessions {held}; clients wait for {clients}, done {[client.done for client in self.clients]}"
        )

    def _check_end(self) -> None:
        book = self.queue.machine.book
        for name, line in book.lines.items():
            demand(len(line) == 0, f"channel {name} still has a line")
        demand(not book.leases, "leases are left")
        durable = self.queue.durable
        demand(not durable.leases and not durable.ready, "the disk has more than outcomes")
        for seq, count in durable.outcomes.items():
            demand(count == 1 + durable.revived.get(seq, 0), f"request {seq} has {count} outcomes")
        for client in self.clients:
            demand(client.read.keys() == client.wanted.keys(), f"{client.name} has read something it did not ask for")
