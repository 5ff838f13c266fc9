"""`penstock status`: channels × workers × blocks, once or live."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.calls import HOW_TO_START, QUICK_RETRY_S, QueueOption, SchedulerOption, call
from penstock.cli.columns import Column, fitted
from penstock.cli.errors import EX_UNAVAILABLE, CommandError
from penstock.client import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS, Client
from penstock.errors import PenstockError
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse
from penstock.request.v1.request_pb2 import Outcome
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, StatusResponse, WorkerStatus

REFRESH_S = 1.0

PLAIN_WIDTH = 200
"""Columns where no terminal says how many there are: enough for every column of the tables."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What queue and scheduler said at one time; None for one that did not answer, with the reason."""

    at_s: float
    queue: StatsResponse | None
    fleet: StatusResponse | None
    problems: tuple[str, ...]

    def ended(self) -> dict[str, int]:
        """Return the number of ended requests per channel."""
        return {c.channel: sum(c.ended_by_outcome) for c in self.queue.channels} if self.queue else {}

    def tokens(self) -> dict[str, int]:
        """Return the number of generated tokens of ended requests per channel."""
        return {c.channel: c.completion_tokens for c in self.queue.channels} if self.queue else {}


def status(
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print both services' answers as one JSON object.")] = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
) -> None:
    """Show channels, workers and blocks, live until Ctrl-C."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if as_json:
        call(_print_json(queue, scheduler))
    elif once or not console.is_terminal:
        call(_print_once(console, queue, scheduler))
    else:
        call(_live(console, queue, scheduler))


async def _print_json(queue: str, scheduler: str) -> None:
    async with Client(queue, scheduler, retry_for_s=QUICK_RETRY_S) as client:
        snapshot = await take(client)
    _refuse_silence(snapshot)
    print(json.dumps(as_object(snapshot), indent=2))
    _need_the_queue(snapshot)


async def _print_once(console: Console, queue: str, scheduler: str) -> None:
    async with Client(queue, scheduler, retry_for_s=QUICK_RETRY_S) as client:
        snapshot = await take(client)
    _refuse_silence(snapshot)
    console.print(render(snapshot, None, console.width))
    _need_the_queue(snapshot)


async def _live(console: Console, queue: str, scheduler: str) -> None:
    before: Snapshot | None = None
    async with Client(queue, scheduler, retry_for_s=0) as client:
        with Live(console=console, auto_refresh=False, screen=True) as screen:
            while True:
                snapshot = await take(client)
                screen.update(render(snapshot, before, console.width), refresh=True)
                before = snapshot
                await asyncio.sleep(REFRESH_S)


async def take(client: Client) -> Snapshot:
    """Ask both services at once."""
    answers = await asyncio.gather(client.stats(), client.fleet(), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, PenstockError):
            raise answer
    queue, fleet = answers
    return Snapshot(
        time.monotonic(),
        queue if isinstance(queue, StatsResponse) else None,
        fleet if isinstance(fleet, StatusResponse) else None,
        tuple(str(answer) for answer in answers if isinstance(answer, PenstockError)),
    )


def as_object(snapshot: Snapshot) -> dict[str, Any]:
    """Return both answers as plain objects, every field present, names as in the protos; null for who is silent.

    The queue's counts by outcome are objects, with the outcomes' names.
    """
    queue = None if snapshot.queue is None else plain(snapshot.queue)
    for channel in queue["channels"] if queue else ():
        channel["ended_by_outcome"] = by_outcome(channel["ended_by_outcome"])
    return {
        "queue": queue,
        "scheduler": None if snapshot.fleet is None else plain(snapshot.fleet),
    }


def by_outcome(counts: Sequence[int]) -> dict[str, int]:
    """Return counts whose places are the numbers of outcomes by the names of these, such as "completed"."""
    names = {number: name.removeprefix("OUTCOME_").lower() for name, number in Outcome.items() if number}
    found = {name: counts[number] if number < len(counts) else 0 for number, name in names.items()}
    # A newer queue may know outcomes that this command does not: they keep their number.
    found |= {str(number): count for number, count in enumerate(counts) if count and number not in names}
    return found


def plain(message: Message) -> dict[str, Any]:
    """Return a wire message as plain values; 64-bit numbers stay numbers, unset messages are null."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.has_presence and not message.HasField(field.name):
        return None
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    if field.is_repeated:
        return [plain(item) if isinstance(item, Message) else item for item in value]
    return value


def render(now: Snapshot, before: Snapshot | None, width: int) -> RenderableType:
    """Return the tables for a terminal of `width` columns; rates are since `before`, or none."""
    parts: list[RenderableType] = [Text(problem, style="red") for problem in now.problems]
    parts += [_channels(now, before, width), _workers(now, width)]
    if now.fleet is not None:
        parts.append(Text(_ledger_line(now.fleet)))
        parts += [Text(line, style="yellow") for line in _unserved_lines(now.fleet)]
    if now.queue is not None:
        refused = "; SUBMITS REFUSED, the disk is nearly full" if now.queue.submits_refused else ""
        parts.append(Text(f"queue: {now.queue.results} results kept, {now.queue.dead} dead letters{refused}"))
    return Group(*parts)


def _channels(now: Snapshot, before: Snapshot | None, width: int) -> Table:
    queued = {c.channel: c for c in now.queue.channels} if now.queue else {}
    scheduled = {c.channel: c for c in now.fleet.channels} if now.fleet else {}

    def waits(show: Callable[[ChannelStats], str]) -> Callable[[str], str]:
        return lambda name: show(queued[name]) if name in queued else "-"

    def runs(show: Callable[[ChannelStatus], str]) -> Callable[[str], str]:
        return lambda name: show(scheduled[name]) if name in scheduled else "-"

    columns: list[Column[str]] = [
        Column("channel", str, name=True),
        Column("waiting", waits(lambda c: str(c.ready))),
        Column("oldest", waits(lambda c: f"{c.oldest_ready_age_ns / 1e9:.1f} s" if c.ready else "-"), rank=2),
        Column("leased", waits(lambda c: str(c.leased)), rank=4),
        Column("reserved", runs(lambda c: str(c.running))),
        Column("blocks held", runs(lambda c: str(c.held_blocks)), short="held"),
        Column("requests/s", lambda name: _rate(name, now, before, "ended"), short="req/s", rank=1),
        Column("tokens/s", lambda name: _rate(name, now, before, "tokens"), short="tok/s", rank=3),
    ]
    return fitted("channels", columns, sorted({*queued, *scheduled}), width)


def _rate(channel: str, now: Snapshot, before: Snapshot | None, what: str) -> str:
    if before is None or now.queue is None or before.queue is None:
        return "-"
    grown = getattr(now, what)().get(channel, 0) - getattr(before, what)().get(channel, 0)
    return f"{max(grown, 0) / max(now.at_s - before.at_s, 1e-3):.1f}"


def _workers(now: Snapshot, width: int) -> Table:
    workers = now.fleet.workers if now.fleet else []
    channels = sorted({channel for worker in workers for channel in worker.held_blocks})
    columns: list[Column[WorkerStatus]] = [
        Column("worker", lambda w: w.worker_id, name=True),
        Column("model", lambda w: w.model, rank=4, name=True),
        Column("state", _worker_state, rank=1, name=True),
        Column("blocks", lambda w: str(w.capacity_blocks), rank=2),
        Column("free", lambda w: str(w.free_blocks)),
        Column("held", lambda w: str(sum(w.held_blocks.values()))),
        *(Column(f"held {name}", _held_by(name), rank=8) for name in channels),
        Column("drift", lambda w: str(w.drift_blocks), rank=6),
        Column("running", lambda w: str(w.engine.running)),
        Column("waiting", lambda w: str(w.engine.waiting)),
        Column("KV used", lambda w: f"{w.engine.kv_cache_usage:.0%}", short="KV", rank=3),
        Column("step", lambda w: f"{w.engine.step_ns / 1e6:.1f} ms", rank=5),
        Column("preempted", lambda w: str(w.engine.preemptions), short="preempt", rank=7),
    ]
    return fitted("workers", columns, workers, width)


def _held_by(channel: str) -> Callable[[WorkerStatus], str]:
    return lambda worker: str(worker.held_blocks.get(channel, 0))


def _worker_state(worker: WorkerStatus) -> str:
    if not worker.connected:
        return "gone"
    if not worker.draining:
        return "up"
    return "draining" if worker.reservations else "drained"


def _ledger_line(fleet: StatusResponse) -> str:
    queue = "connected" if fleet.queue_connected else "NOT connected"
    return (
        f"policy {fleet.policy}, queue {queue}; {fleet.grants} grants; refunds: {fleet.tokenizer_refund_blocks} blocks"
        f" at {fleet.tokenizer_refunds} tokenizer ACKs, {fleet.completion_refund_blocks} at {fleet.completion_refunds}"
        f" completion ACKs; audit violations {fleet.audit_violations}"
    )


def _unserved_lines(fleet: StatusResponse) -> list[str]:
    """Return a line for each model that requests wait for in vain."""
    return [
        f"{unserved.waiting} requests wait for "
        + (f"the model {unserved.model!r}, which no connected worker serves" if unserved.model else "a worker")
        for unserved in fleet.unserved_models
    ]


def _refuse_silence(snapshot: Snapshot) -> None:
    if snapshot.queue is None and snapshot.fleet is None:
        raise CommandError(f"{'; '.join(snapshot.problems)}; {HOW_TO_START}", EX_UNAVAILABLE)


def _need_the_queue(snapshot: Snapshot) -> None:
    """Raise CommandError if the queue did not answer: what was shown is half of the answer."""
    if snapshot.queue is None:
        raise CommandError(f"{'; '.join(snapshot.problems)}; {HOW_TO_START}", EX_UNAVAILABLE)
