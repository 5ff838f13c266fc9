"""What each planned fault does to the processes, the network and the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation import lies
from tests.simulation.plan import AT_WORKER, FAULTS, Fault
from tests.simulation.store import LEAST_FREE_BYTES
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.client_actor import ClientActor
    from tests.simulation.run import Simulation
    from tests.simulation.worker_actor import WorkerActor

SLOWNESS = 20
"""Times as long as usual a message takes on a slow network."""

TOKENIZERS = 1 / 3
"""Share of tokenizers among the engines and tokenizers that die."""


class Faults:
    """Does the faults of a plan to one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        """Do them to `simulation`."""
        self._sim = simulation
        self._net = simulation.net
        by_kind: dict[str, Callable[[Fault], None]] = {
            "queue crash": lambda f: self._sim.queue.crash(f.value < 0.5),
            "queue crash in a write, lost": lambda f: self._crash_in_write(False),
            "queue crash in a write, kept": lambda f: self._crash_in_write(True),
            "queue stalled": lambda f: self._freeze(f, self._sim.queue),
            "store write fails": lambda f: self._writes_fail(f, False),
            "store write fails, kept": lambda f: self._writes_fail(f, True),
            "store sync fails, lost": lambda f: self._syncs_fail(f, True),
            "store sync fails, kept": lambda f: self._syncs_fail(f, False),
            "store read fails": self._reads_fail,
            "disk full": self._disk_full,
            "scheduler crash": lambda f: self._sim.scheduler.crash(f.value < 0.5),
            "scheduler stalled": lambda f: self._freeze(f, self._sim.scheduler),
            "client crash": lambda f: self._client(f).crash(f.value < 0.5),
            "client stalled": lambda f: self._client(f).stall(f.duration_ns),
            "Backlog stream dropped": lambda f: self._snap(self._sim.scheduler, self._sim.queue),
            "client's streams dropped": lambda f: self._snap(self._client(f), self._sim.queue),
            "partition scheduler-queue": lambda f: self._cut(f, self._sim.scheduler, self._sim.queue, False),
            "partition scheduler-queue, one way": lambda f: self._cut(f, self._sim.scheduler, self._sim.queue, True),
            "partition client-queue": lambda f: self._cut(f, self._client(f), self._sim.queue, f.value < 0.4),
            "slow network": self._slow,
            "batch cancelled": lambda f: self._client(f).cancel(None),
            "dead letters requeued": lambda f: self._client(f).requeue_all(),
            "lie: claim never granted": lambda f: lies.claim_never_granted(self._sim, self._worker(f), f.value),
            "lie: stale completion": lambda f: lies.stale_completion(self._worker(f), f.value),
            "lie: gives back what it has not": lambda f: lies.give_back(self._worker(f), f.value),
            "lie: old Backlog stream": lambda f: lies.old_backlog_stream(self._sim, f.value),
        }
        at_worker: dict[str, Callable[[Fault, WorkerActor], object]] = {
            "worker crash": lambda f, w: w.crash(f.value < 0.5),
            "worker stalled": lambda f, w: w.stall(f.duration_ns),
            "worker shut down": lambda f, w: w.shut_down(),
            "worker drained, restarted": lambda f, w: self._drain(f, w, False),
            "worker drained, taken back": lambda f, w: self._drain(f, w, True),
            "engine or tokenizer dies": lambda f, w: w.tokenizer_dies() if f.value < TOKENIZERS else w.engine_dies(),
            "Work stream dropped": lambda f, w: self._snap(w, self._sim.queue),
            "Credits stream dropped": lambda f, w: self._snap(w, self._sim.scheduler),
            "partition worker-queue": lambda f, w: self._cut(f, w, self._sim.queue, False),
            "partition worker-queue, one way": lambda f, w: self._cut(f, w, self._sim.queue, True),
            "partition worker-scheduler": lambda f, w: self._cut(f, w, self._sim.scheduler, False),
            "partition worker-scheduler, one way": lambda f, w: self._cut(f, w, self._sim.scheduler, True),
            "lie: duplicate ACK": lambda f, w: lies.duplicate_acks(w),
            "lie: stale epoch": lambda f, w: lies.stale_epoch(self._sim, w, f.value),
            "lie: wrong block count": lambda f, w: lies.wrong_block_count(w, f.value),
            "lie: wrong inventory": lambda f, w: lies.wrong_inventory(self._sim, w, f.value),
        }
        self._by_kind, self._at_worker = by_kind, at_worker
        assert {*by_kind, *at_worker} == {*FAULTS}

    def plan(self) -> None:
        """Plan every fault of the simulation."""
        for fault in self._sim.plan.faults:
            self._sim.world.after(fault.at_ns, self._do, fault)

    def _do(self, fault: Fault) -> None:
        self._sim.world.note(fault)
        at_worker = self._at_worker.get(fault.kind)
        if at_worker is not None:
            worker = self._worker(fault)
            if worker.up:
                assert FAULTS[fault.kind] == AT_WORKER
                self._sim.coverage.fault(fault.kind, worker)
                at_worker(fault, worker)
            return
        target = self._target(fault)
        if target.up:
            if "in a write" not in fault.kind:  # counted when it happens
                self._sim.coverage.fault(fault.kind)
            self._by_kind[fault.kind](fault)

    def _target(self, fault: Fault) -> Process:
        """Return the process that must be running for the fault to be one."""
        if fault.kind.startswith(("scheduler", "Backlog", "partition scheduler")):
            return self._sim.scheduler
        if fault.kind.startswith(("client", "batch", "dead letters", "partition client")):
            return self._client(fault)
        if fault.kind.startswith("lie: ") and "Backlog" not in fault.kind:
            return self._worker(fault)
        return self._sim.queue

    def _worker(self, fault: Fault) -> WorkerActor:
        return self._sim.workers[fault.target % len(self._sim.workers)]

    def _client(self, fault: Fault) -> ClientActor:
        return self._sim.clients[fault.target % len(self._sim.clients)]

    # ---- processes ----

    def _crash_in_write(self, kept: bool) -> None:
        self._sim.queue.crash_in_write = kept

    def _freeze(self, fault: Fault, server: Process) -> None:
        server.stall(fault.duration_ns)
        self._net.freeze(server)

    def _drain(self, fault: Fault, worker: WorkerActor, undo: bool) -> None:
        """Drain the worker, and have its operator restart it, or think better of it, some time later."""
        self._sim.scheduler.drain(worker.name, False)
        life = worker.life

        def end() -> None:
            if undo:
                self._sim.scheduler.drain(worker.name, True)
            elif worker.up and worker.life == life:
                worker.shut_down()

        self._sim.world.after(fault.duration_ns, end)

    # ---- the disk ----

    def _writes_fail(self, fault: Fault, kept: bool) -> None:
        store = self._sim.store
        store.writes_fail, store.keeps_failed = True, kept
        self._sim.world.after(fault.duration_ns, store.heal)

    def _syncs_fail(self, fault: Fault, lost: bool) -> None:
        store = self._sim.store
        store.syncs_fail, store.loses_unsynced = True, lost
        self._sim.world.after(fault.duration_ns, store.heal)

    def _reads_fail(self, fault: Fault) -> None:
        store = self._sim.store
        store.reads_fail = True
        store.writes_fail = fault.value < 0.5
        self._sim.world.after(fault.duration_ns, store.heal)

    def _disk_full(self, fault: Fault) -> None:
        """Fill the disk beyond the watermark, or to the last byte."""
        self._sim.store.free_bytes = LEAST_FREE_BYTES - 1 if fault.value < 0.5 else 0
        self._sim.world.after(fault.duration_ns, self._sim.store.heal)

    # ---- the network ----

    def _snap(self, one: Process, other: Process) -> None:
        for stream in self._net.between(one, other):
            stream.snap()

    def _cut(self, fault: Fault, one: Process, other: Process, one_way: bool) -> None:
        to = not one_way or int(fault.value * 1000) % 2 == 0
        self._net.partition(one, other, fault.duration_ns, to, not (one_way and to))

    def _slow(self, fault: Fault) -> None:
        sim = self._sim
        for client in (*sim.workers, *sim.clients, sim.scheduler):
            self._net.slow(client, sim.queue, fault.duration_ns, SLOWNESS)
        for worker in sim.workers:
            self._net.slow(worker, sim.scheduler, fault.duration_ns, SLOWNESS)
