"""The machine between a queue and workers whose streams lag, break and come back in any order.

Queue and workers are small honest models; the queue alone decides who runs what. Whatever happens before, once
everything is healed every request must end, no credit may be lost, and no audit may ever have failed. What is rejected
has ended, and must have been hopeless: nobody who could hold it had been heard of for the grace period.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.admission.predictive import Predictive
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from tests.support.effort import examples
from tests.support.scheduling import SECOND_NS, announced, shape

CAPACITY = 20
CAPACITIES = {"w1": CAPACITY, "w2": CAPACITY // 2, "w3": CAPACITY // 4}
MODELS = {"w1": ("m", "n", "alias"), "w2": ("m",), "w3": ("m", "alias")}
"""The largest answers to all names, so that whatever waits can run once everything is healed."""
REQUESTS = 12
GRACE_NS = 5 * SECOND_NS
Cause = m.ReleaseCause


@dataclass
class Request:
    """The queue's truth of one request: its size, its state and its attempt."""

    blocks: int
    position: int
    channel: str
    model: str = ""
    n: int = 1
    state: str = "ready"
    attempt: int = 1
    holder: str = ""

    @property
    def tokens(self) -> int:
        """Of every completion: together they fit where the blocks do."""
        return max(self.blocks // self.n, 1)

    def could_run_on(self, worker_id: str) -> bool:
        """Whether the worker serves the model and, idle, has the blocks for all completions."""
        serves = not self.model or self.model in MODELS[worker_id]
        return serves and self.n * self.tokens <= CAPACITIES[worker_id]


@dataclass
class Node:
    """A worker process: what it holds (request, blocks, claimed) and its two wires.

    `away_ns` is since when the scheduler has no stream of it, None while it has one.
    """

    worker_id: str
    instance: int = 0
    epoch: int = 0
    away_ns: int | None = 0
    held: dict[str, tuple[int, bool]] = field(default_factory=dict)
    to_scheduler: deque[m.Input] = field(default_factory=deque)
    from_scheduler: deque[m.Effect] = field(default_factory=deque)


class World:
    """Queue, workers and scheduler, driven by one source of chance."""

    def __init__(self, chance: random.Random, policy: str) -> None:
        self.chance = chance
        self.policy = policy
        self.now_ns = 0
        self.epoch = 0
        self.seq = 0
        self.requests = {
            f"r{n}": Request(
                chance.randint(1, CAPACITY),
                n,
                chance.choice(("interactive", "batch")),
                chance.choice(("", "m", "n", "alias")),
                chance.choice((1, 1, 2)),
            )
            for n in range(REQUESTS)
        }
        self.nodes = {name: Node(name) for name in CAPACITIES}
        self.listed: set[str] = set()
        self.backlog: deque[m.Input] = deque()
        self.rejects: deque[m.RejectRequest] = deque()
        """On their way to the queue, on the same stream as the backlog comes from there."""
        self.restart_scheduler()

    # ---- faults ----

    def restart_scheduler(self) -> None:
        tier = self.chance.choice((0, 0, 1))
        shares = {"interactive": Share(4.0, self.chance.choice((0.1, 0.4))), "batch": Share(1.0, 0.0, 1.0, tier)}
        self.machine = Machine(POLICIES[self.policy], shares, GRACE_NS, self.now_ns)
        self.break_backlog()
        for node in self.nodes.values():
            node.away_ns = self.now_ns
            self.break_credits(node)

    def reconfigure(self) -> None:
        """The configuration has other channels from now on, perhaps not those that requests wait in."""
        names = self.chance.sample(("interactive", "batch", "new"), self.chance.randint(1, 3))
        shares = {name: Share(self.chance.randint(1, 9), 0.1, self.chance.choice((0.3, 1.0))) for name in names}
        self.tell(m.Reconfigure(shares))

    def break_backlog(self) -> None:
        """The Backlog stream is lost with all that is on it, and opened again."""
        self.backlog.clear()
        self.rejects.clear()
        self.listed.clear()
        self.tell(m.QueueClosed())
        self.backlog.append(m.QueueOpened(("interactive", "batch")))
        for name, request in self.requests.items():
            if request.state == "ready":
                self.announce(name)

    def break_credits(self, node: Node) -> None:
        """The Credits stream is lost with all that is on it; the next one starts with the inventory."""
        node.to_scheduler.clear()
        node.from_scheduler.clear()
        self.tell(m.WorkerClosed(node.epoch))
        self.epoch += 1
        node.epoch = self.epoch
        inventory = tuple(
            m.Holding(name, self.requests[name].channel, blocks, self.seq) for name, (blocks, _) in node.held.items()
        )
        opened = m.WorkerOpened(
            node.epoch,
            node.worker_id,
            f"i{node.instance}",
            MODELS[node.worker_id],
            shape(CAPACITIES[node.worker_id]),
            inventory,
            guaranteed_first=self.chance.random() < 0.5,
        )
        node.to_scheduler.append(opened)

    def kill_worker(self, node: Node) -> None:
        node.held.clear()
        node.instance += 1
        for name, request in self.requests.items():
            if request.state == "leased" and request.holder == node.worker_id:
                self.requeue(name, failed=True)
        self.break_credits(node)

    # ---- the queue ----

    def announce(self, name: str) -> None:
        request = self.requests[name]
        self.listed.add(name)
        told = {"attempt": request.attempt, "model": request.model, "n": request.n, "last_attempt": request.attempt > 1}
        self.backlog.append(announced(name, request.channel, request.tokens, request.position, **told))

    def unlist(self, name: str, reason: m.GoneReason) -> None:
        if name in self.listed:
            self.listed.discard(name)
            self.backlog.append(m.Gone(name, reason))

    def requeue(self, name: str, failed: bool) -> None:
        request = self.requests[name]
        request.state, request.holder = "ready", ""
        request.attempt += failed
        self.announce(name)

    def lease_lost(self) -> None:
        """A lease expires although its worker still runs the request."""
        leased = [name for name, request in self.requests.items() if request.state == "leased"]
        if leased:
            self.requeue(self.chance.choice(leased), failed=True)

    def cancel(self) -> None:
        ready = [name for name, request in self.requests.items() if request.state == "ready"]
        if ready:
            self.end_in_line(self.chance.choice(ready))

    def end_in_line(self, name: str) -> None:
        self.requests[name].state = "done"
        self.unlist(name, m.GoneReason.ENDED)

    def hear_reject(self) -> None:
        """The queue reads one rejection; of a request that has been claimed meanwhile it means nothing."""
        if self.rejects and self.requests[name := self.rejects.popleft().request_id].state == "ready":
            self.end_in_line(name)

    # ---- a worker ----

    def release(self, node: Node, name: str, cause: m.ReleaseCause) -> None:
        del node.held[name]
        self.seq += 1
        node.to_scheduler.append(m.CompletionAck(node.epoch, node.epoch, name, self.seq, cause))

    def hear(self, node: Node) -> None:
        """The worker reads one message of the scheduler."""
        if not node.from_scheduler:
            return
        message = node.from_scheduler.popleft()
        if isinstance(message, m.Grant) and message.request_id not in node.held:
            node.held[message.request_id] = (message.booked_blocks, False)
        elif isinstance(message, m.Recall) and node.held.get(message.request_id, (0, True))[1] is False:
            self.release(node, message.request_id, Cause.RECALLED)

    def work(self, node: Node) -> None:
        """The worker claims, settles, or ends one of the requests it holds."""
        if not node.held:
            return
        name = self.chance.choice(list(node.held))
        blocks, claimed = node.held[name]
        request = self.requests[name]
        if not claimed:
            self.claim(node, name)
        elif request.holder != node.worker_id:
            self.release(node, name, Cause.LEASE_LOST)
        elif self.chance.random() < 0.3:
            self.seq += 1
            # A reservation that follows its output may grow, also beyond the pool.
            most = CAPACITY if self.machine.policy.reserve_output_tokens else blocks
            node.held[name] = (self.chance.randint(1, most), True)
            ack = m.TokenizerAck(node.epoch, node.epoch, name, self.seq, node.held[name][0])
            node.to_scheduler.append(ack)
        else:
            self.end(node, name)

    def claim(self, node: Node, name: str) -> None:
        request = self.requests[name]
        if self.chance.random() < 0.1:
            self.release(node, name, Cause.UNCLAIMED)
        elif request.state == "ready":
            request.state, request.holder = "leased", node.worker_id
            node.held[name] = (node.held[name][0], True)
            self.unlist(name, m.GoneReason.CLAIMED)
        else:
            self.release(node, name, Cause.CLAIM_REFUSED)

    def end(self, node: Node, name: str) -> None:
        fate = self.chance.random()
        if fate < 0.7:
            self.requests[name].state, self.requests[name].holder = "done", ""
            self.release(node, name, Cause.COMPLETED)
        elif fate < 0.85:
            self.requeue(name, failed=True)
            self.release(node, name, Cause.FAILED)
        else:
            self.requeue(name, failed=False)
            self.release(node, name, Cause.LEASE_LOST)

    # ---- wires ----

    def tell(self, message: m.Input) -> None:
        self.note_stream(message)
        effects = self.machine.step(message, self.now_ns)
        effects += self.machine.arbitrate(self.now_ns)
        for effect in effects:
            if isinstance(effect, m.RejectRequest):
                self.check_hopeless(effect)
                self.rejects.append(effect)
            elif isinstance(effect, m.Grant | m.Recall | m.TellDrain):
                for node in self.nodes.values():
                    if node.epoch == effect.epoch:
                        node.from_scheduler.append(effect)

    def note_stream(self, message: m.Input) -> None:
        """Note which workers the scheduler has a stream of from the message on."""
        for node in self.nodes.values():
            if isinstance(message, m.WorkerOpened) and message.worker_id == node.worker_id:
                node.away_ns = None
            elif isinstance(message, m.WorkerClosed) and message.epoch == node.epoch and node.away_ns is None:
                node.away_ns = self.now_ns

    def step(self, faults: bool) -> None:
        self.now_ns += SECOND_NS // 10
        node = self.chance.choice(list(self.nodes.values()))
        if faults and self.chance.random() < 0.1:
            self.chance.choice(
                (
                    self.restart_scheduler,
                    self.reconfigure,
                    self.break_backlog,
                    lambda: self.break_credits(node),
                    lambda: self.kill_worker(node),
                    lambda: self.tell(m.DrainRequested(node.worker_id, self.chance.random() < 0.5)),
                    self.lease_lost,
                    self.cancel,
                )
            )()
        self.hear_reject()
        wire = self.chance.choice((self.backlog, node.to_scheduler))
        if wire:
            self.tell(wire.popleft())
        self.hear(node)
        self.work(node)
        self.tell(m.Tick())
        assert self.machine.counters.audit_violations == 0
        self.check_forecasts()

    def check_hopeless(self, reject: m.RejectRequest) -> None:
        """Whoever could hold it has been away for the grace period; who comes later than that is not waited for."""
        request = self.requests[reject.request_id]
        for node in self.nodes.values():
            if request.could_run_on(node.worker_id):
                assert node.away_ns is not None, reject
                assert self.now_ns - node.away_ns >= GRACE_NS, reject

    def check_forecasts(self) -> None:
        """What is predicted is predicted of exactly the requests that hold credits."""
        policy = self.machine.policy
        if isinstance(policy, Predictive):
            assert set(policy._views) == {worker.epoch for worker in self.machine.fleet}
            for worker in self.machine.fleet:
                assert set(policy._views[worker.epoch].flights) == set(worker.ledger)

    def settle_down(self) -> None:
        """Nothing fails any more: everything must end."""
        for _ in range(20_000):
            if all(request.state == "done" for request in self.requests.values()) and not self.busy():
                return
            self.step(faults=False)
            for name in CAPACITIES:
                self.tell(m.DrainRequested(name, undo=True))
        raise AssertionError(f"stuck: {self.requests}")

    def busy(self) -> bool:
        wires = any(node.to_scheduler or node.from_scheduler for node in self.nodes.values())
        return bool(self.backlog or self.rejects) or wires or any(node.held for node in self.nodes.values())


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 300), policy=st.sampled_from(sorted(POLICIES)))
@example(seed=0, steps=300, policy="virtual-channels")
@example(seed=5856, steps=15, policy="predictive")  # the largest worker is heard of after the grace period only
def test_after_any_faults_every_request_ends_and_every_credit_is_home(seed: int, steps: int, policy: str) -> None:
    world = World(random.Random(seed), policy)
    for _ in range(steps):
        world.step(faults=True)
    world.settle_down()
    for _ in range(100):
        world.step(faults=False)
    for worker in world.machine.fleet:
        assert worker.ledger.free_blocks == CAPACITIES[worker.worker_id]
        assert worker.closed_ns is None
    assert len(world.machine.backlog) == 0
    assert sum(world.machine.backlog.waiting.values()) == 0
