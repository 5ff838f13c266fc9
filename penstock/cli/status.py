"""`penstock status`: channels × workers × blocks, once or live."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import repeat
from typing import Annotated, Any

import typer
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.address import DEFAULT_QUEUE_ADDRESS, DEFAULT_SCHEDULER_ADDRESS
from penstock.cli.calls import HOW_TO_START, KEY_HINT, QUICK_RETRY_S, QueueOption, SchedulerOption, call
from penstock.cli.columns import Column, bare, fitted
from penstock.cli.errors import CommandError
from penstock.cli.live import Picture, show
from penstock.cli.screen import Section, fitted_screen, lines_section
from penstock.client import Client
from penstock.exits import EX_NOPERM, EX_UNAVAILABLE
from penstock.live.rates import Rate, Rates
from penstock.live.reader import take
from penstock.live.reading import Reading
from penstock.live.state import state_of, tally, urgency
from penstock.live.view import channel_names, stands_by, tenants_line, unserved_lines, why_refused
from penstock.queue.v1.queue_pb2 import ChannelStats, StatsResponse
from penstock.request.v1.request_pb2 import Outcome
from penstock.scheduler.v1.scheduler_pb2 import ChannelStatus, StatusResponse, WorkerStatus
from penstock.telling import escape_unknown

REFRESH_S = 1.0
"""Between two readings, each of them a call of the queue and one of the scheduler."""

PLAIN_WIDTH = 200
"""Columns where no terminal says how many there are: enough for every column of the tables."""


def status(
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print both services' answers as one JSON object.")] = False,
    queue: QueueOption = DEFAULT_QUEUE_ADDRESS,
    scheduler: SchedulerOption = DEFAULT_SCHEDULER_ADDRESS,
) -> None:
    """Show channels, workers and blocks, live until Ctrl-C."""
    escape_unknown(sys.stdout, "replace")  # by what takes one column, as it does
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
        reading = await take(client)
    refuse_silence(reading)
    print(json.dumps(as_object(reading), indent=2))
    need_both(reading)


async def _print_once(console: Console, queue: str, scheduler: str) -> None:
    async with Client(queue, scheduler, retry_for_s=QUICK_RETRY_S) as client:
        reading = await take(client)
    refuse_silence(reading)
    console.print(render(reading, {}, console.width))
    need_both(reading)


async def _live(console: Console, queue: str, scheduler: str) -> None:
    rates = Rates()
    async with Client(queue, scheduler, retry_for_s=0) as client:

        async def look() -> Picture:
            reading = await take(client)
            flows = rates.take(reading)
            return lambda width, height: render(reading, flows, width, height)

        await show(console, look, repeat(REFRESH_S), asyncio.Event())


def as_object(reading: Reading) -> dict[str, Any]:
    """Return both answers as plain objects, every field present, names as in the protos; null for what is not told.

    The queue's counts by outcome are objects, with the outcomes' names.
    """
    return {
        "queue": None if reading.queue is None else _queue_object(reading.queue),
        "scheduler": None if reading.fleet is None else plain(reading.fleet),
    }


def _queue_object(told: StatsResponse) -> dict[str, Any]:
    queue = plain(told)
    for channel in queue["channels"]:
        channel["ended_by_outcome"] = by_outcome(channel["ended_by_outcome"])
    if told.names_only:
        channels = [_only(channel, {"channel"}) for channel in queue["channels"]]
        queue = _only(queue, {"store_id", "names_only"}) | {"channels": channels}
    return queue


def _only(told: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """Return an object in which what is not named is null."""
    return {name: value if name in names else None for name, value in told.items()}


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


def render(now: Reading, rates: Mapping[str, Rate], width: int, height: int | None = None) -> RenderableType:
    """Return the tables for a terminal of `width` columns; channels without a rate show none.

    Without a `height` that is everything; else as much as goes into so many lines, and how much is left out.
    """
    held = {channel.channel: channel.held_blocks for channel in now.fleet.channels} if now.fleet else {}
    ready = {channel.channel: channel.ready for channel in now.counts.channels} if now.counts else {}
    unserved = unserved_lines(now.fleet) if now.fleet else []
    sections: list[Section[Any]] = [
        lines_section("problems", [Text(problem, style="red") for problem in now.problems]),
        Section(
            "channels",
            channel_names(now),
            lambda names, tight: _channels(now, rates, names, width, tight),
            lambda names: sorted(names, key=lambda name: (-ready.get(name, 0), -held.get(name, 0))),
        ),
        Section(
            "workers",
            now.fleet.workers if now.fleet else [],
            lambda workers, tight: _workers(workers, width, tight),
            lambda workers: sorted(workers, key=lambda worker: urgency(state_of(worker), worker.drift_blocks)),
            lambda workers: tally(map(state_of, workers)),
        ),
        lines_section("models", [Text(line, style="yellow") for line in unserved]),
    ]
    return fitted_screen([], sections, _last_lines(now), width, height)


def _last_lines(now: Reading) -> list[Text]:
    lines = [_ledger_line(now.fleet, stands_by(now))] if now.fleet else []
    if now.counts is not None:
        lines += [line] if (line := tenants_line(now.counts)) else []
        refused = f"; SUBMITS REFUSED: {why_refused(now.counts)}" if now.counts.submits_refused else ""
        lines.append(f"queue: {now.counts.results} results kept, {now.counts.dead} dead letters{refused}")
    elif now.queue is not None:
        lines.append("queue: - results kept, - dead letters")
    return [Text(line) for line in lines]


def _channels(now: Reading, rates: Mapping[str, Rate], names: Sequence[str], width: int, tight: bool) -> Table:
    queued = {c.channel: c for c in now.counts.channels} if now.counts else {}
    scheduled = {c.channel: c for c in now.fleet.channels} if now.fleet else {}

    def waits(show: Callable[[ChannelStats], str]) -> Callable[[str], str]:
        return lambda name: show(queued[name]) if name in queued else "-"

    def runs(show: Callable[[ChannelStatus], str]) -> Callable[[str], str]:
        return lambda name: show(scheduled[name]) if name in scheduled else "-"

    def flows(per_s: Callable[[Rate], float]) -> Callable[[str], str]:
        return lambda name: f"{per_s(rates[name]):.1f}" if name in rates else "-"

    columns: list[Column[str]] = [
        Column("channel", str, name=True),
        Column("waiting", waits(lambda c: str(c.ready))),
        Column("oldest", waits(lambda c: f"{c.oldest_ready_age_ns / 1e9:.1f} s" if c.ready else "-"), rank=2),
        Column("leased", waits(lambda c: str(c.leased)), rank=4),
        Column("reserved", runs(lambda c: str(c.running))),
        Column("blocks held", runs(lambda c: str(c.held_blocks)), short="held"),
        Column("requests/s", flows(lambda rate: rate.requests_per_s), short="req/s", rank=1),
        Column("tokens/s", flows(lambda rate: rate.tokens_per_s), short="tok/s", rank=3),
    ]
    table = fitted("channels", columns, names, width)
    return bare(table) if tight else table


def _workers(workers: Sequence[WorkerStatus], width: int, tight: bool) -> Table:
    channels = sorted({channel for worker in workers for channel in worker.held_blocks})
    columns: list[Column[WorkerStatus]] = [
        Column("worker", lambda w: w.worker_id, name=True),
        Column("model", lambda w: w.model, rank=4, name=True),
        Column("state", state_of, rank=1, name=True),
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
    table = fitted("workers", columns, workers, width)
    return bare(table) if tight else table


def _held_by(channel: str) -> Callable[[WorkerStatus], str]:
    return lambda worker: str(worker.held_blocks.get(channel, 0))


def _ledger_line(fleet: StatusResponse, stands_by: bool) -> str:
    queue = "connected" if fleet.queue_connected else "NOT connected"
    if stands_by:
        queue = "standby (another scheduler is connected to it)"
    return (
        f"policy {fleet.policy}, queue {queue}; {fleet.grants} grants; refunds: {fleet.tokenizer_refund_blocks} blocks"
        f" at {fleet.tokenizer_refunds} tokenizer ACKs, {fleet.completion_refund_blocks} at {fleet.completion_refunds}"
        f" completion ACKs; audit violations {fleet.audit_violations}"
    )


def refuse_silence(reading: Reading) -> None:
    """Raise CommandError if neither service answered."""
    if reading.queue is None and reading.fleet is None:
        raise no_answer(reading)


def need_both(reading: Reading) -> None:
    """Raise CommandError if queue or scheduler did not answer: what was shown is half of the answer.

    Where one has told, the other's refusal is an answer: there is no more for this key.
    """
    refuse_silence(reading)
    if (reading.queue is None or reading.fleet is None) and not reading.refused:
        raise no_answer(reading)


def no_answer(reading: Reading) -> CommandError:
    """Return the error of a command that was not told what it asked for."""
    why = "; ".join(reading.problems)
    if reading.refused:
        return CommandError(f"{why}{KEY_HINT}", EX_NOPERM)
    return CommandError(f"{why}; {HOW_TO_START}" if reading.absent else why, EX_UNAVAILABLE)
