"""The workers as the scheduler sees them: one record per epoch, its ledger inside.

Workers that answer to the same models and count tokens into blocks alike form a
*group*: a request needs the same number of blocks on each of them, so that is found
once and not once per worker. Their capacities may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from services.core.drain import NEVER_ASKED, Drain
from services.scheduler.core.geometry import Geometries, GroupKey, token_geometry
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.messages import EngineReport, EngineShape, WorkerOpened

MOST_SERVED_MODELS = 1024
"""Names the queue is told of as served, the protocol's bound. Each may have a window announced in every channel, so the
scheduler's memory follows from it."""

LINKING_LOOKS = 8
"""Groups among which one is looked for that has all models by which one that leaves has linked others."""

POOLS_REMEMBERED = 64
"""Pools without a worker whose accounts are kept: what channels had paid and owe when the last one's stream broke."""

MOST_SEQUENCES = 1 << 20
"""Requests a fleet is believed to run at once. Windows, and so the scheduler's memory, follow from it."""


Groups = dict[GroupKey, int]
"""The largest capacity in blocks of each group."""


class Pool:
    """Groups that compete: those that a model they both serve links, and whoever is linked to these.

    A request that names its model may run in one pool only, one that names none in any.
    """

    __slots__ = ("groups", "may_return", "models")

    def __init__(self) -> None:
        """Start without any."""
        self.groups: list[Group] = []
        self.may_return = False
        """Whether its last worker has left lately: one that serves the same may only open its stream again."""
        self.models = {""}
        """What may be asked of it, "" for any."""

    @property
    def present(self) -> bool:
        """Whether it has any group."""
        return bool(self.groups)

    def serves(self, model: str) -> bool:
        """Return whether a worker of it answers to this model name; "" accepts any."""
        return model in self.models


@dataclass(slots=True, eq=False)
class Group:
    """Workers that differ only in capacity and speed. `shape` has the capacity of the largest."""

    key: GroupKey
    shape: EngineShape
    pool: Pool
    geometry: int = 0
    """The number of its token geometry: groups that have the same count tokens into blocks alike."""
    workers: dict[int, Worker] = field(default_factory=dict)
    least_blocks: int = 0
    """Capacity of the smallest."""
    cheapest: Worker | None = None
    """One of those of which a sequence is the least part."""

    @property
    def models(self) -> tuple[str, ...]:
        """The names its workers answer to."""
        return self.key.models

    def measure(self) -> None:
        """Find the largest and least capacity after a worker has come or gone; one that is away for a moment counts."""
        capacities = [worker.shape.capacity_blocks for worker in self.workers.values()]
        self.shape = self.shape.replace(capacity_blocks=max(capacities, default=0))
        self.least_blocks = min(capacities, default=0)
        self.cheapest = min(self.workers.values(), key=Worker.blocks_per_sequence, default=None)

    def charged_blocks(self, blocks: int, sequences: int) -> int:
        """Return the least that a request is charged for on any of its workers, before it is known on which."""
        return blocks if self.cheapest is None else self.cheapest.charged_blocks(blocks, sequences)


@dataclass(slots=True, eq=False)
class Worker:
    """One epoch of one worker.

    `closed_ns` is when its stream ended (None while it is open), `paused_until_ns`
    keeps grants away from a worker that has just handed one back unclaimed.
    """

    epoch: int
    worker_id: str
    instance_id: str
    models: tuple[str, ...]
    shape: EngineShape
    most_sequences: int
    ledger: Ledger
    group: Group
    takes_standing: bool = False
    adapters: tuple[str, ...] = ()
    displaces: bool = False
    """Whether a request within a guarantee needs nothing free: its engine runs it before others, and preempts those."""
    drain: Drain = NEVER_ASKED
    """What operators last asked of it."""
    leaving: bool = False
    """Whether it takes no new grants for the rest of its life."""
    shares: bool = False
    """Whether what requests hold together may be booked once more: if they part, the engine may have to preempt."""
    closed_ns: int | None = None
    paused_until_ns: int = 0
    standing_paused_until_ns: int = 0
    """Keeps standing grants away from a worker that has just handed one back unasked."""
    drift_blocks: int = 0
    report: EngineReport | None = None

    @property
    def draining(self) -> bool:
        """Whether it takes no new grants, for its own reasons or an operator's."""
        return self.drain.wanted or self.leaving

    @property
    def usable_blocks(self) -> int:
        """Credit that the next grant may take: bookable by the ledger, less what the engine sees otherwise.

        The engine's view is a little old: the difference measured at its last report stands until the next one.
        An idle worker is taken at the ledger's word, or a request as large as its pool could never start.
        """
        if not self.drift_blocks or not len(self.ledger):
            return self.ledger.bookable_blocks
        return max(self.ledger.bookable_blocks - self.drift_blocks, 0)

    @property
    def reach_blocks(self) -> int:
        """What `usable_blocks` would be in a pool without a size: tells apart workers that may take any request.

        Those are the idle one and those that hold no more than what may be booked ahead.
        """
        ledger = self.ledger
        drift_blocks = self.drift_blocks if len(ledger) else 0
        return ledger.balance_blocks + ledger.ahead_blocks - drift_blocks

    def blocks_per_sequence(self) -> float:
        """Return the blocks there are for each completion if it runs as many as it may."""
        return self.shape.capacity_blocks / self.most_sequences

    def charged_blocks(self, blocks: int, sequences: int) -> int:
        """Return what so many of its blocks and sequences are charged for, in blocks: the larger part of the two.

        That is dominant-resource fairness (Ghodsi et al., NSDI '11): who takes a place of few in an engine keeps as
        many blocks from others as they would have with it, however few it holds. Who asks for more places than there
        are takes all of them.
        """
        most = self.most_sequences
        return max(blocks, min(sequences, most) * self.shape.capacity_blocks // most)

    def takes_grants(self, now_ns: int) -> bool:
        """Return whether grants may be sent to it now."""
        return not self.draining and self.closed_ns is None and now_ns >= self.paused_until_ns

    def observe(self, report: EngineReport) -> None:
        """Take the engine's own view; ledger minus engine, where positive, is the drift."""
        self.report = report
        ledger = self.ledger
        ledger.shared_blocks = report.blocks_shared if self.shares else 0
        if report.blocks_free is None:
            self.drift_blocks = 0
        else:
            self.drift_blocks = max(ledger.balance_blocks - report.blocks_free, 0)


class Pools:
    """The pools of all groups. Who is linked to more than before stays in its pool; what falls apart is in new ones."""

    def __init__(self) -> None:
        """Start with none."""
        self.pools: list[Pool] = []
        self._by_model: dict[str, Pool] = {}
        self._gone: dict[Pool, None] = {}

    def serving(self, model: str) -> list[Pool]:
        """Return the pools that serve the model, "" for all."""
        if not model:
            return self.pools
        pool = self._by_model.get(model)
        return [] if pool is None else [pool]

    def add(self, group: Group) -> None:
        """Link a group that has come."""
        found = (self._by_model.get(model) for model in group.models)
        linked = sorted({pool for pool in found if pool is not None}, key=self.pools.index)
        pool = linked[0] if linked else self._open(group.models)
        for other in linked[1:]:
            self.pools.remove(other)
            self._take(pool, other.groups)
            other.groups = []
            other.models = {""}
        self._take(pool, [group])

    def remove(self, group: Group, serving: Mapping[str, list[Group]]) -> None:
        """Forget a group that is gone; what it alone has linked is apart from then on.

        `serving` are those that are left, by model.
        """
        pool, group.pool = group.pool, Pool()
        left = [other for other in pool.groups if other is not group]
        if left and _stay_linked([model for model in group.models if model in serving], serving):
            for model in group.models:
                if model not in serving:
                    pool.models.discard(model)
                    self._by_model.pop(model, None)
            self.pools.remove(pool)
            self.pools.append(pool)
            pool.groups = left
            return
        for model in pool.models:
            self._by_model.pop(model, None)
        self.pools.remove(pool)
        pool.groups = []
        if not left:
            self._keep(pool)
            return
        pool.models = {""}
        self.pools.append(pool)
        self._take(pool, left[:1])
        for other in left[1:]:
            self.add(other)

    def _keep(self, pool: Pool) -> None:
        """Let whoever serves one of its models next have the pool: most come back when their stream broke."""
        pool.may_return = True
        self._gone[pool] = None
        if len(self._gone) > POOLS_REMEMBERED:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            oldest.may_return = False
            oldest.models = {""}

    def _open(self, models: tuple[str, ...]) -> Pool:
        pool = next((gone for gone in self._gone if not gone.models.isdisjoint(models)), None)
        if pool is None:
            pool = Pool()
        else:
            del self._gone[pool]
            pool.may_return = False
            pool.models = {""}
        self.pools.append(pool)
        return pool

    def _take(self, pool: Pool, groups: list[Group]) -> None:
        pool.groups += groups
        for group in groups:
            group.pool = pool
            pool.models.update(group.models)
            self._by_model.update(dict.fromkeys(group.models, pool))


def _stay_linked(models: list[str], serving: Mapping[str, list[Group]]) -> bool:
    """Return whether groups that a group has linked by these models, which it shares with them, are linked without it.

    They are by one model alone, and by several that any of them has; where it takes more to tell the answer is no.
    """
    if len(models) == 1:
        return True
    return any(all(model in other.models for model in models) for other in serving[models[0]][:LINKING_LOOKS])


class Fleet:
    """Every live epoch, and which one is the present life of each worker."""

    def __init__(self, sequence_slack: float, ahead_share: float = 0.0, engines_preempt: bool = False) -> None:
        """Let a worker have `sequence_slack` times its max_num_seqs completions reserved at once.

        `ahead_share` of its pool may be booked ahead of what is free. `engines_preempt` if the policy lets them.
        """
        self._sequence_slack = sequence_slack
        self._ahead_share = ahead_share
        self._engines_preempt = engines_preempt
        self._by_epoch: dict[int, Worker] = {}
        self._by_id: dict[str, Worker] = {}
        self._groups: dict[GroupKey, Group] = {}
        self._serving: dict[str, list[Group]] = {}
        """All names that anybody answers to: what callers make up is looked up in vain, and costs no more."""
        self._nobody: list[Group] = []
        self.geometries = Geometries()
        """To be read and not changed."""
        self._models: tuple[str, ...] | None = ()
        self._pools = Pools()
        self.changes = 0
        """How many workers have come and gone."""

    @property
    def pools(self) -> list[Pool]:
        """The pools, in the order in which they came; to be read and not changed."""
        return self._pools.pools

    def pools_serving(self, model: str) -> list[Pool]:
        """Return the pools that serve the model; "" for all of them."""
        return self._pools.serving(model)

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over the workers, those in their grace period included."""
        return iter(self._by_epoch.values())

    def __len__(self) -> int:
        """Return the number of live epochs."""
        return len(self._by_epoch)

    def open(self, opened: WorkerOpened) -> Worker:
        """Add the epoch; the worker's earlier one must have been removed."""
        worker = Worker(
            epoch=opened.epoch,
            worker_id=opened.worker_id,
            instance_id=opened.instance_id,
            models=opened.models,
            shape=opened.shape,
            most_sequences=max(int(opened.shape.max_num_seqs * self._sequence_slack), 1),
            ledger=Ledger(opened.shape.capacity_blocks, int(opened.shape.capacity_blocks * self._ahead_share)),
            group=self._group(opened),
            takes_standing=opened.takes_standing,
            adapters=opened.adapters,
            displaces=opened.guaranteed_first and self._engines_preempt,
            drain=opened.drain,
            leaving=opened.leaving,
            shares=self._engines_preempt,
        )
        self.changes += 1
        worker.group.workers[worker.epoch] = worker
        worker.group.measure()
        worker.ledger.adopt(opened.inventory)
        self._by_epoch[worker.epoch] = worker
        self._by_id[worker.worker_id] = worker
        return worker

    def get(self, epoch: int) -> Worker | None:
        """Return the worker of this epoch, None if the epoch is over."""
        return self._by_epoch.get(epoch)

    def named(self, worker_id: str) -> Worker | None:
        """Return the present life of the worker, None if it has none."""
        return self._by_id.get(worker_id)

    def remove(self, worker: Worker) -> None:
        """Forget the epoch."""
        self.changes += 1
        del self._by_epoch[worker.epoch]
        if self._by_id.get(worker.worker_id) is worker:
            del self._by_id[worker.worker_id]
        group = worker.group
        del group.workers[worker.epoch]
        group.measure()
        if not group.workers:
            self._forget(group)

    def largest_blocks(self) -> Groups:
        """Return the capacity of the largest worker of each group."""
        return {key: group.shape.capacity_blocks for key, group in self._groups.items()}

    def serving(self, model: str) -> list[Group]:
        """Return the groups that answer to the model, in the order they came; to be read and not changed."""
        return self._serving.get(model, self._nobody)

    def served(self) -> Collection[str]:
        """Return what may be asked for and somebody serves, "" for any; to be read and not changed."""
        return self._serving

    def _group(self, opened: WorkerOpened) -> Group:
        key = GroupKey(opened.models, token_geometry(opened.shape))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, opened.shape, Pool(), self.geometries.add(key.geometry))
            self._pools.add(group)
            self._models = None
            for model in dict.fromkeys(("", *group.models)):
                self._serving[model] = [*self.serving(model), group]
        return group

    def _forget(self, group: Group) -> None:
        """Answer with a group no more that has lost its last worker."""
        del self._groups[group.key]
        self._models = None
        for model in dict.fromkeys(("", *group.models)):
            self._serving[model] = [other for other in self._serving[model] if other is not group]
            if not self._serving[model]:
                del self._serving[model]
        self._pools.remove(group, self._serving)
        self.geometries.remove(group.key.geometry)

    def models(self) -> tuple[str, ...]:
        """Return what may be asked for and somebody serves, sorted: all names of every worker, and "" for any.

        Of more than MOST_SERVED_MODELS they are those of the groups that came first.
        """
        if self._models is None:
            names: dict[str, None] = {}
            for group in self._groups.values():
                names.update(dict.fromkeys(("", *group.models)))
                if len(names) >= MOST_SERVED_MODELS:
                    break
            self._models = tuple(sorted(islice(names, MOST_SERVED_MODELS)))
        return self._models

    def sequences(self) -> int:
        """Return how many requests the connected engines can run at once, at most MOST_SEQUENCES."""
        connected = (worker.shape.max_num_seqs for worker in self._by_epoch.values() if worker.closed_ns is None)
        return min(sum(connected), MOST_SEQUENCES)
