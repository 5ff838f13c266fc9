"""Peers that speak the protocol and lie: the services refuse or absorb it, go on, and can still say how they are."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from penstock.queue.v1 import queue_pb2
from penstock.scheduler.v1 import scheduler_pb2
from services.clock import SystemClock
from services.queue import wire as queue_wire
from services.queue.core.effects import Deliver, Effect, PutResult, Submitted, Write
from services.queue.core.messages import BacklogOpened, Message, NewRequest, Submit, Tick
from services.queue.core.records import PAYLOADS, seq_key
from services.queue.metrics import QueueMetrics
from services.queue.outlet import EARLY, FOR_SCHEDULER, FOR_WORKERS, Early, Released
from services.queue.speaker import Greeting, Link, Speaker
from services.queue.storage.verify import Verifier
from services.queue.watch.hub import WatchHub
from services.rpc.outbox import Outbox
from services.rpc.strict import BadInputError
from services.scheduler import wire as scheduler_wire
from services.scheduler.core import messages as m
from services.scheduler.core.admission.policies import POLICIES
from services.scheduler.core.machine import Machine
from services.scheduler.core.sharing.share import Share
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.runner import Runner
from services.scheduler.tracing import CreditSpans
from services.telemetry import Telemetry
from tests.support.arbitrary import fuzzed, messages
from tests.support.queueing import PAYLOAD, RULES, STORE_ID, Queue, meta
from tests.support.scheduling import announced

CHANNELS = ("batch", "interactive")
NAMES = ("", "w", "r1", "r2", "r3", "batch", "interactive", "m", "x" * 600)


class Scheduler:
    """A scheduler with an honest worker, a queue that has announced three requests, and a liar on a stream."""

    def __init__(self, policy: str) -> None:
        self.registry = CollectorRegistry()
        machine = Machine(POLICIES[policy], {name: Share() for name in CHANNELS}, 0, 0)
        self.machine = machine
        metrics = SchedulerMetrics(self.registry)
        self.runner = Runner(machine, SystemClock(), CreditSpans(Telemetry(None)), metrics, 20)
        self.queue = Outbox()
        self.runner.open_queue(self.queue)
        self.runner.feed([m.Tick(), m.QueueOpened(CHANNELS)])
        self.honest = self.runner.open_worker(opening("honest"))
        self.runner.feed(announced(name, "batch", 3, n) for n, name in enumerate(("r1", "r2", "r3")))
        self.runner.wake()

    def say(self) -> None:
        """Say everything that the service would be asked for; raises if a number cannot be said."""
        self.runner.feed([m.Tick()])
        self.runner.wake()
        self.runner.look()
        scheduler_wire.status(self.runner.snapshot(), self.runner.unserved()).SerializeToString()
        generate_latest(self.registry)
        assert self.machine.counters.audit_violations == 0


def opening(worker_id: str) -> scheduler_pb2.WorkerToScheduler:
    opened = scheduler_pb2.CreditsOpen(
        worker_id=worker_id, instance_id="i", capacity_blocks=6, block_size=1, max_model_len=100, model="m",
        role=scheduler_pb2.WORKER_ROLE_UNIFIED, max_num_seqs=5,
    )  # fmt: skip
    return scheduler_pb2.WorkerToScheduler(open=opened)


def lying_opening(lie: scheduler_pb2.CreditsOpen) -> scheduler_pb2.WorkerToScheduler:
    """Return an opening with what `lie` sets; most of the rest is as it should be."""
    made = opening("liar")
    made.open.MergeFrom(lie)
    made.open.role = scheduler_pb2.WORKER_ROLE_UNIFIED
    return made


@fuzzed
@given(
    st.sampled_from(sorted(POLICIES)),
    messages(scheduler_pb2.CreditsOpen, NAMES),
    st.lists(
        messages(scheduler_pb2.WorkerToScheduler, NAMES) | messages(queue_pb2.QueueToScheduler, NAMES), max_size=8
    ),
)
def test_a_scheduler_survives_its_peers(policy: str, lie: scheduler_pb2.CreditsOpen, told: list[Any]) -> None:
    scheduler = Scheduler(policy)
    try:
        liar = scheduler.runner.open_worker(lying_opening(lie))
    except scheduler_wire.InvalidFieldError:
        liar = scheduler.runner.open_worker(opening("liar"))
    scheduler.runner.wake()
    for message in told:
        try:
            if isinstance(message, scheduler_pb2.WorkerToScheduler):
                for ack in (message.tokenizer_ack, message.completion_ack, message.engine_report):
                    if message.WhichOneof("message") in {"tokenizer_ack", "completion_ack", "engine_report"}:
                        ack.epoch = liar.epoch
                heard = scheduler_wire.from_worker(rewound(message), liar.epoch)
            else:
                heard = scheduler_wire.from_queue(message)
        except scheduler_wire.InvalidFieldError:
            continue
        scheduler.runner.feed([heard])
        scheduler.say()
    assert not scheduler.honest.outbox.closed, "the honest worker's stream goes on"


def rewound(message: scheduler_pb2.WorkerToScheduler) -> scheduler_pb2.WorkerToScheduler:
    """Return the message as it would come off the wire."""
    return scheduler_pb2.WorkerToScheduler.FromString(message.SerializeToString())


class LoudQueue(Queue):
    """A queue whose effects are said, on streams 1 (Backlog) and 2 (Work)."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = QueueMetrics(CollectorRegistry())
        greeting = Greeting(STORE_ID, RULES.lease_ns, RULES.max_inflight)
        self.speaker = Speaker(WatchHub(), self.metrics, Telemetry(None), SystemClock(), greeting, lambda _: None)
        self.speaker.links.update({1: Link(), 2: Link()})

    def hear(self, *heard: Message) -> None:
        """Step, commit and say."""
        everything = [effect for message in heard for effect in self.machine.step(message, self.now_ns)]
        sealed = self.machine.seal()
        writes = [effect for effect in everything if isinstance(effect, Write)]
        writes += [queue_wire.result_write(effect) for effect in everything if isinstance(effect, PutResult)]
        self.store.write([*writes, sealed.counters])
        wanted = [effect.seq for effect in everything if isinstance(effect, Deliver)]
        payloads = {seq: row for seq in wanted if (row := self.store.get(PAYLOADS, seq_key(seq))) is not None}
        for_workers: list[Effect] = [effect for effect in everything if type(effect) in FOR_WORKERS]
        for_scheduler: list[Effect] = [effect for effect in everything if type(effect) in FOR_SCHEDULER]
        self.speaker.foretell(Early(for_workers, payloads, for_scheduler))
        rest: list[Effect] = [effect for effect in everything if type(effect) not in {*EARLY, Write}]
        self.speaker.release(Released(rest, sealed.progress))
        self.now_ns += 1

    def names(self) -> list[str]:
        """Submit two requests and return their names."""
        effects = self.machine.step(Submit(1, tuple(NewRequest(meta(), PAYLOAD) for _ in range(2))), self.now_ns)
        writes = [effect for effect in effects if isinstance(effect, Write)]
        self.store.write([*writes, self.machine.seal().counters])
        (answer,) = (effect for effect in effects if isinstance(effect, Submitted))
        return [name for name, _ in answer.acks]


FIRST, SECOND = f"{STORE_ID}-000000000001", f"{STORE_ID}-000000000002"


@fuzzed
@given(
    st.lists(
        messages(queue_pb2.WorkerToQueue, (FIRST, SECOND, "", "w"))
        | messages(queue_pb2.SchedulerToQueue, (FIRST, SECOND, "batch", "")),
        max_size=10,
    )
)
def test_a_queue_survives_its_peers(told: list[Any]) -> None:
    queue = LoudQueue()
    assert queue.names() == [FIRST, SECOND]
    queue.hear(BacklogOpened(1))
    opening_ = queue_pb2.WorkOpen(worker_id="w", instance_id="i")
    queue.hear(queue_wire.worker_opened(2, opening_))
    for message in told:
        try:
            if isinstance(message, queue_pb2.SchedulerToQueue):
                heard = queue_wire.scheduler_message(1, message, RULES.channels)
            elif message.WhichOneof("message") == "open":
                heard = queue_wire.worker_opened(2, message.open)
            elif message.WhichOneof("message") == "tokens":
                continue
            else:
                heard = queue_wire.worker_message(2, message)
        except BadInputError:
            continue
        queue.hear(heard)
        queue.hear(Tick())
    assert queue.machine.audit.whole() == ()
    assert [found.line() for found in Verifier(queue.store).violations()] == []
    for link in queue.speaker.links.values():
        for frame in link.outbox._messages:
            decoded(frame if isinstance(frame, bytes) else frame())


def decoded(frame: bytes) -> None:
    """Read a message of either stream."""
    try:
        queue_pb2.QueueToWorker.FromString(frame)
    except DecodeError:
        queue_pb2.QueueToScheduler.FromString(frame)
