"""Which fault met which state: a table that shows what a set of simulations has really tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from services.queue.core import messages as qm
from services.queue.core.lifecycle import State as QueueState
from services.worker.core.lifecycle import State as WorkerState
from tests.simulation.plan import ANY_STATE, AT_WORKER, FAULTS, HAPPENS

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.worker_actor import WorkerActor

Cells = Counter[tuple[str, str]]

REACHABLE: dict[str, tuple[str, ...]] = {**FAULTS, **HAPPENS}

WHY_NOT = (
    "A fault of a worker, of its engine, tokenizer or streams meets the requests that this worker holds: waiting ones"
    " are at no worker, and of ended and dead ones it holds nothing any more.",
    "An engine fails, or preempts, what runs in it. Deleting is for outcomes that were read, requeueing for dead"
    " letters. A deadline that passes after the end changes nothing and is not looked at. A lease can only be lost"
    " while there is one.",
)

AT_WORKER_STATES = {
    WorkerState.GRANTED: "granted",
    WorkerState.CLAIMING: "granted",
    WorkerState.OFFERED: "granted",
    WorkerState.WITHDRAWING: "granted",
    WorkerState.TOKENIZING: "leased",
    WorkerState.RUNNING: "running",
    WorkerState.CANCELLING: "stopping",
    WorkerState.DROPPING: "stopping",
    WorkerState.HANDING_BACK: "stopping",
    WorkerState.FINISHING: "completing",
}
"""granted: booked, perhaps claimed or on offer; leased: at the worker, not in the engine; stopping: being aborted;
completing: the completion is not recorded yet."""


class Coverage:
    """Counts what met what in one simulation."""

    def __init__(self) -> None:
        """Count nothing yet; `bind` follows."""
        self.cells: Cells = Counter()
        self._simulation: Simulation
        self._asked: dict[type, Callable[[Any], None]] = {
            qm.Cancel: self._cancelled,
            qm.Delete: self._deleted,
            qm.RequeueDead: self._requeued,
            qm.Submit: self._submitted,
        }

    def bind(self, simulation: Simulation) -> None:
        """Look at this simulation's processes."""
        self._simulation = simulation

    def fault(self, kind: str, worker: WorkerActor | None = None) -> None:
        """Count a fault that hits everything, or one worker with what it holds, in the states they are in."""
        states = self._states_of(worker) if worker is not None else self._all_states()
        self.cells[kind, ""] += 1
        for state in states:
            self.cells[kind, state] += 1

    def happened(self, kind: str, request_id: str) -> None:
        """Count something that befell one request."""
        self.cells[kind, ""] += 1
        self.cells[kind, self.state_of(request_id)] += 1

    def at(self, kind: str, state: str) -> None:
        """Count something that befell a request in a known state."""
        self.cells[kind, ""] += 1
        self.cells[kind, state] += 1

    def lost(self, state: WorkerState) -> None:
        """Count a lease that was lost while its worker had the request in this state."""
        self.at("lease lost", AT_WORKER_STATES[state])

    def queue_message(self, message: qm.Message, loading: bool) -> None:
        """Count what clients ask of requests, before it is done; `loading` if the store is still being read."""
        if loading and isinstance(message, qm.Submit):
            self.at("submit while loading", "waiting")
        count = self._asked.get(type(message))
        if count is not None:
            count(message)

    def _cancelled(self, message: qm.Cancel) -> None:
        for request_id in message.request_ids or ():
            if self._simulation.queue.machine.book.find(request_id) is None:
                self.at("cancel", "ended")

    def _deleted(self, message: qm.Delete) -> None:
        for row in message.rows:
            self.at("delete", "dead" if row.seq in self._simulation.queue.durable.dead_seqs else "ended")

    def _requeued(self, message: qm.RequeueDead) -> None:
        book = self._simulation.queue.machine.book
        for request_id in message.request_ids or tuple(book.name_of(seq) for seq in book.dead):
            self.happened("requeue", request_id)

    def _submitted(self, message: qm.Submit) -> None:
        for new in message.requests:
            if new.known_seq is not None:
                self.happened("repeated submit", self._simulation.queue.machine.book.name_of(new.known_seq))

    def state_of(self, request_id: str) -> str:
        """Return where a request is, as the queue and its worker know."""
        entry = self._simulation.queue.machine.book.find(request_id)
        if entry is None:
            return "ended"
        if entry.state is QueueState.DEAD:
            return "dead"
        if entry.state is QueueState.READY:
            return "granted" if self._is_granted(request_id) else "waiting"
        for worker in self._simulation.workers:
            if worker.name == entry.worker_id and worker.up:
                held = worker.session._held.by_run.get(f"{request_id}.{entry.fencing_token}")
                if held is not None and (entry.state is QueueState.LEASED or held.state is WorkerState.FINISHING):
                    return AT_WORKER_STATES[held.state]
        return "leased" if entry.state is QueueState.LEASED else "stopping"

    def _is_granted(self, request_id: str) -> bool:
        scheduler = self._simulation.scheduler
        return scheduler.up and any(request_id in worker.ledger for worker in scheduler.machine.fleet)

    def _all_states(self) -> set[str]:
        queue = self._simulation.queue
        states = {"ended"} if queue.durable.results - queue.durable.dead_seqs else set()
        return states | {self.state_of(entry.name) for entry in queue.machine.book.entries.values()}

    @staticmethod
    def _states_of(worker: WorkerActor) -> set[str]:
        held = worker.session._held
        return {AT_WORKER_STATES[entry.state] for entry in (*held.by_request.values(), *held.by_run.values())}


def missing(cells: Mapping[tuple[str, str], int], every_cell: bool) -> list[str]:
    """Return what never happened: faults, or if `every_cell` also their meetings with states they can meet."""
    wanted = [(kind, "") for kind in REACHABLE]
    if every_cell:
        wanted += [(kind, state) for kind, states in REACHABLE.items() for state in states]
    return [f"{kind} / {state}" if state else kind for kind, state in wanted if not cells.get((kind, state))]


def table(cells: Mapping[tuple[str, str], int]) -> str:
    """Return the table; a dash marks a cell that cannot be reached."""
    width = max(map(len, REACHABLE))
    head = f"{'fault':{width}} {'times':>8}" + "".join(f"{state:>11}" for state in ANY_STATE)
    lines = [head]
    for kind, reachable in REACHABLE.items():
        counts = (str(cells.get((kind, state), 0)) if state in reachable else "-" for state in ANY_STATE)
        lines.append(f"{kind:{width}} {cells.get((kind, ''), 0):8}" + "".join(f"{count:>11}" for count in counts))
    return "\n".join([*lines, *WHY_NOT])


assert set(AT_WORKER_STATES.values()) == set(AT_WORKER)
