"""What a broken or hostile peer may say: nothing of it may hurt anybody but the liar.

A worker that lies about its credits runs on credits that are not there until it is started anew; its own engine may
then be given more than it holds, which is its own affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from services.queue.core import messages as qm
from services.queue.core.entry import Failure, LeaseRef
from services.queue.core.lifecycle import Outcome
from services.scheduler.core import messages as sm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.run import Simulation
    from tests.simulation.worker_actor import WorkerActor

T = TypeVar("T")

FAR_AHEAD = 1_000_000
"""Added to sequence numbers of invented ACKs, so that they win over true ones."""


def _pick(things: Sequence[T], value: float) -> T | None:
    """Return the thing that a drawn value between 0 and 1 points at."""
    return things[int(value * len(things))] if things else None


def duplicate_acks(worker: WorkerActor) -> None:
    """Say the last ACKs again; those of an earlier epoch, said in this one, are no repetition but untrue."""
    if worker.credits is None:
        return
    for ack in worker.acks:
        worker.engine.trusts &= ack.epoch == worker.epoch
        worker.credits.up(ack.replace(epoch=worker.epoch))


def stale_epoch(sim: Simulation, worker: WorkerActor, value: float) -> None:
    """Send ACKs and a report under an epoch that is over, has never been, or is another worker's."""
    other = sim.workers[int(value * 1000) % len(sim.workers)]
    epoch = other.epoch if other is not worker else worker.old_epoch if value < 0.5 else worker.epoch - 1
    held = [*worker.session._held.by_request.values(), *(other.session._held.by_request.values() if other.up else ())]
    if worker.credits is not None:
        for entry in held:
            worker.credits.up(sm.TokenizerAck(0, epoch, entry.request_id, entry.seq + FAR_AHEAD, 1))
            worker.credits.up(
                sm.CompletionAck(0, epoch, entry.request_id, entry.seq + FAR_AHEAD, sm.ReleaseCause.COMPLETED)
            )
        worker.credits.up(sm.EngineReport(0, epoch, 0))


def wrong_block_count(worker: WorkerActor, value: float) -> None:
    """Tell of more or fewer blocks than are held, or of an end that has not come."""
    entry = _pick(list(worker.session._held.by_request.values()), value)
    if entry is None or worker.credits is None:
        return
    worker.engine.trusts = False
    seq = entry.seq + (FAR_AHEAD if value < 0.5 else 1)
    blocks = int(value * 3 * worker.options.capacity_blocks)
    if value < 0.8:
        worker.credits.up(sm.TokenizerAck(0, worker.epoch, entry.request_id, seq, blocks))
    else:
        cause = sm.ReleaseCause.UNCLAIMED if value < 0.9 else sm.ReleaseCause.COMPLETED
        worker.credits.up(sm.CompletionAck(0, worker.epoch, entry.request_id, seq, cause))


def wrong_inventory(sim: Simulation, worker: WorkerActor, value: float) -> None:
    """Open a new Credits stream with reservations that are not there, of requests that are and of some that are not."""
    worker.engine.trusts = False
    names = [entry.name for entry in sim.queue.machine.book.entries.values()]
    found = _pick(names, value)
    held = worker.session._held.by_request
    invented = [name for name in (found, "5eed5eed-ffffffffffff") if name is not None and name not in held]
    blocks = int(value * 2 * worker.options.capacity_blocks)
    worker.invented = tuple(sm.Holding(name, "batch", blocks, 1) for name in invented)
    for stream in sim.net.between(worker, sim.scheduler):
        stream.snap()


def claim_never_granted(sim: Simulation, worker: WorkerActor, value: float) -> None:
    """Claim requests that were not granted to this worker, and one that does not exist; offer to run any other."""
    names = [entry.name for entry in sim.queue.machine.book.entries.values()]
    for name in (_pick(names, value), "5eed5eed-ffffffffffff"):
        if name is not None and name not in worker.session._held.by_request:
            worker.up_work(qm.Claim(worker.work_number, name))
    for channel in ("interactive", "batch"):
        worker.up_work(qm.Offer(worker.work_number, f"standing/0-{channel}", channel, "", False, 1 << 40, 1 << 40, 0))


def stale_completion(worker: WorkerActor, value: float) -> None:
    """Complete again what was completed, and what is running under a token that is too low."""
    stale: list[LeaseRef] = list(worker.leases)
    for entry in worker.session._held.by_run.values():
        held = entry.the_lease
        lease = LeaseRef(held.request_id, held.attempt, held.fencing_token)
        stale.append(lease.replace(fencing_token=lease.fencing_token - 1))
        stale.append(lease.replace(attempt=lease.attempt + 1))
    for lease in stale:
        outcome = Outcome.COMPLETED if value < 0.7 else None
        worker.up_work(qm.Complete(worker.work_number, lease, outcome, None, None))


def give_back(worker: WorkerActor, value: float) -> None:
    """Hand back and renew leases that are not held."""
    stale = tuple(worker.leases)
    worker.up_work(qm.GiveBack(worker.work_number, stale))
    worker.up_work(qm.Renew(worker.work_number, stale))


def old_backlog_stream(sim: Simulation, value: float) -> None:
    """Have something arrive from a Backlog stream that is over."""
    failure = Failure("model_not_found", "said on an old stream")
    for entry in list(sim.queue.machine.book.entries.values()):
        sim.queue.post(sim.queue.committer.post, qm.Reject(sim.scheduler.old_number, entry.name, failure))
    sim.queue.post(sim.queue.committer.post, qm.SetWindow(sim.scheduler.old_number, "batch", 0))
