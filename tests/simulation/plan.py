"""Everything a seed decides beforehand: the fleet, the requests, and the list of faults, which can be cut."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from tests.simulation.world import MS

CHANNELS = ("interactive", "batch")
BLOCK_SIZE = 16
WINDOW = 512
"""Tokens, prompt and output together: 32 blocks, so that no engine below is too small for a whole window."""

ALIKE_SHARE = 1 / 3
"""Seeds whose requests are mostly small, of few kinds, and far apart: what standing grants are for."""

STRETCH = 4
"""Such a seed's requests and faults are spread over so many times the time."""

ANY_STATE = ("waiting", "granted", "leased", "running", "stopping", "completing", "ended", "dead")
"""Where a request can be; `coverage.Census` says what each word means."""

AT_WORKER = ("granted", "leased", "running", "stopping", "completing")
"""Where a request that a worker knows of can be."""

FAULTS: dict[str, tuple[str, ...]] = {
    "queue crash": ANY_STATE,
    "queue crash in a write, lost": ANY_STATE,
    "queue crash in a write, kept": ANY_STATE,
    "queue stalled": ANY_STATE,
    "store write fails": ANY_STATE,
    "store write fails, kept": ANY_STATE,
    "store sync fails, lost": ANY_STATE,
    "store sync fails, kept": ANY_STATE,
    "store read fails": ANY_STATE,
    "disk full": ANY_STATE,
    "scheduler crash": ANY_STATE,
    "scheduler stalled": ANY_STATE,
    "worker crash": AT_WORKER,
    "worker stalled": AT_WORKER,
    "worker shut down": AT_WORKER,
    "worker drained, restarted": AT_WORKER,
    "worker drained, taken back": AT_WORKER,
    "engine or tokenizer dies": AT_WORKER,
    "client crash": ANY_STATE,
    "client stalled": ANY_STATE,
    "Work stream dropped": AT_WORKER,
    "Credits stream dropped": AT_WORKER,
    "Backlog stream dropped": ANY_STATE,
    "client's streams dropped": ANY_STATE,
    "partition worker-queue": AT_WORKER,
    "partition worker-queue, one way": AT_WORKER,
    "partition worker-scheduler": AT_WORKER,
    "partition worker-scheduler, one way": AT_WORKER,
    "partition scheduler-queue": ANY_STATE,
    "partition scheduler-queue, one way": ANY_STATE,
    "partition client-queue": ANY_STATE,
    "slow network": ANY_STATE,
    "batch cancelled": ANY_STATE,
    "dead letters requeued": ANY_STATE,
    "lie: duplicate ACK": AT_WORKER,
    "lie: stale epoch": AT_WORKER,
    "lie: wrong block count": AT_WORKER,
    "lie: wrong inventory": AT_WORKER,
    "lie: claim never granted": ANY_STATE,
    "lie: stale completion": ANY_STATE,
    "lie: gives back what it has not": ANY_STATE,
    "lie: old Backlog stream": ANY_STATE,
}
"""Faults of the plan, and the states of requests each can hit: those of requests that its target has to do with."""

HAPPENS: dict[str, tuple[str, ...]] = {
    "engine failure": ("running",),
    "prompt ends its tokenizer": ("leased",),
    "run ends its engine": ("running",),
    "preemption": ("running",),
    "submit while loading": ("waiting",),
    "repeated submit": ("waiting", "granted", "leased", "running", "stopping", "completing", "ended", "dead"),
    "cancel": ANY_STATE,
    "deadline": ("waiting", "granted", "leased", "running", "stopping", "completing"),
    "delete": ("ended", "dead"),
    "requeue": ("dead",),
    "standing grant met": ("leased",),
    "lease lost": ("leased", "running", "stopping", "completing"),
    "stale completion refused": ("waiting", "granted", "leased", "running", "stopping", "completing", "ended", "dead"),
}
"""What happens by itself, by share or as a consequence, and the states of the request it happens to."""


@dataclass(frozen=True)
class Options:
    """The fleet of a seed; printed first, so that a failure can be read."""

    seed: int
    workers: int
    clients: int
    requests: int
    faults: int
    fault_window_ms: int
    arrival_ms: int
    most_delay_ms: int
    keepalive_ms: int
    sync_ms: int
    tokenizer_ms: int
    longest_run_ms: int
    abort_ms: int
    policy: str
    capacity_blocks: int
    max_attempts: int
    max_inflight: int
    lease_ms: int
    failing_share: float
    preempting_share: float
    cancel_share: float
    deadline_share: float
    over_long_share: float
    delete_share: float
    requeue_share: float
    repeat_share: float
    alike: bool

    def __str__(self) -> str:
        """Return one line with every option."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True)
class Fault:
    """One planned fault: what, when, to which worker or client, for how long, and a number that it may use."""

    number: int
    kind: str
    at_ns: int
    target: int
    duration_ns: int
    value: float

    def __str__(self) -> str:
        """Return what the transcript says."""
        return f"fault {self.number}: {self.kind} (target {self.target}, {self.duration_ns / MS:.0f} ms)"


@dataclass(frozen=True)
class Wanted:
    """One planned request and what its client does with it."""

    number: int
    client: int
    at_ns: int
    channel: str
    priority: int
    prompt_tokens: int
    told: str
    max_tokens: int
    completions: int
    deadline_ns: int
    """After the submit; 0 for none."""
    cancel_ns: int
    """After the ack; 0 for never."""
    delete: bool
    requeue: bool
    repeat: bool

    @property
    def key(self) -> str:
        """Idempotency key."""
        return f"key-{self.number}"


@dataclass(frozen=True)
class Plan:
    """What a seed plays. Cutting faults or requests leaves the others as they are."""

    options: Options
    faults: tuple[Fault, ...]
    requests: tuple[Wanted, ...]

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Return the plan of a seed."""
        rng = random.Random(seed)
        options = _draw_options(rng, seed)
        faults = tuple(_draw_fault(rng, options, number) for number in range(options.faults))
        plan = cls(options, faults, tuple(_draw_request(rng, options, number) for number in range(options.requests)))
        return plan._made_alike() if options.alike else plan

    def _made_alike(self) -> Plan:
        """Return the plan with requests that are mostly small, far apart, and its faults as far."""
        options = replace(self.options, fault_window_ms=self.options.fault_window_ms * STRETCH)
        options = replace(options, arrival_ms=options.fault_window_ms)
        stretched = options.arrival_ms // self.options.arrival_ms
        return Plan(
            options,
            tuple(replace(fault, at_ns=fault.at_ns * STRETCH) for fault in self.faults),
            tuple(_small(wanted, wanted.at_ns * stretched) for wanted in self.requests),
        )

    def cut(self, faults: Collection[int] | None = None, requests: Collection[int] | None = None) -> Plan:
        """Return the plan with these faults and requests only; None keeps all."""
        return replace(
            self,
            faults=tuple(fault for fault in self.faults if faults is None or fault.number in faults),
            requests=tuple(wanted for wanted in self.requests if requests is None or wanted.number in requests),
        )


def _draw_options(rng: random.Random, seed: int) -> Options:
    return Options(
        seed=seed,
        workers=rng.choice((1, 1, 2, 3)),
        clients=rng.choice((1, 2)),
        requests=rng.choice((5, 15, 30, 50)),
        faults=rng.choice((0, 2, 6, 12, 20)),
        fault_window_ms=(window_ms := rng.choice((500, 1500, 3000))),
        arrival_ms=window_ms // rng.choice((1, 2, 5)),
        most_delay_ms=rng.choice((1, 5, 40)),
        keepalive_ms=rng.choice((100, 400, 1500)),
        sync_ms=rng.choice((1, 5, 20)),
        tokenizer_ms=rng.choice((2, 20, 80)),
        longest_run_ms=rng.choice((200, 600, 1500)),
        abort_ms=rng.choice((2, 60, 250)),
        policy=rng.choice(("worst-case", "tokenizer-ack", "virtual-channels", "predictive", "predictive")),
        capacity_blocks=rng.choice((40, 80)),
        max_attempts=rng.choice((1, 2, 3)),
        max_inflight=rng.choice((2, 8, 64)),
        lease_ms=rng.choice((600, 2000)),
        failing_share=rng.choice((0.0, 0.1, 0.3)),
        preempting_share=rng.choice((0.0, 0.02)),
        cancel_share=rng.choice((0.0, 0.2, 0.5)),
        deadline_share=rng.choice((0.0, 0.1, 0.3)),
        over_long_share=rng.choice((0.0, 0.1)),
        delete_share=rng.choice((0.0, 0.5)),
        requeue_share=rng.choice((0.0, 0.5)),
        repeat_share=rng.choice((0.0, 0.2)),
        alike=rng.random() < ALIKE_SHARE,
    )


def _draw_fault(rng: random.Random, options: Options, number: int) -> Fault:
    return Fault(
        number,
        rng.choice(tuple(FAULTS)),
        rng.randint(1, options.fault_window_ms) * MS,
        rng.randint(0, 5),
        rng.choice((rng.randint(1, 60), rng.randint(50, 500), rng.randint(300, 2500))) * MS,
        rng.random(),
    )


def _draw_request(rng: random.Random, options: Options, number: int) -> Wanted:
    over_long = rng.random() < options.over_long_share
    return Wanted(
        number,
        number % options.clients,
        rng.randint(1, options.arrival_ms) * MS,
        rng.choice(CHANNELS),
        rng.choice((0, 0, 1)),
        WINDOW + 10 if over_long else rng.choice((rng.randint(1, 60), rng.randint(1, WINDOW - 100))),
        rng.choice(("bytes", "bytes", "tokens", "nothing")),
        rng.choice((rng.randint(1, 99), rng.randint(1, 99), 0)),
        rng.choice((1, 1, 1, 2)),
        rng.choice((rng.randint(1, 100), rng.randint(1, 2000))) * MS if rng.random() < options.deadline_share else 0,
        rng.choice((rng.randint(1, 60), rng.randint(1, 800))) * MS if rng.random() < options.cancel_share else 0,
        rng.random() < options.delete_share,
        rng.random() < options.requeue_share,
        rng.random() < options.repeat_share,
    )


def _small(wanted: Wanted, at_ns: int) -> Wanted:
    """Return a request of a few tokens; one in ten stays as large as it was, and outgrows what stands."""
    if wanted.number % 10 == 9:
        return replace(wanted, at_ns=at_ns)
    told = "bytes" if wanted.told == "nothing" else wanted.told
    return replace(
        wanted, at_ns=at_ns, told=told, prompt_tokens=4 + wanted.number % 4, max_tokens=8, completions=1, priority=0
    )
