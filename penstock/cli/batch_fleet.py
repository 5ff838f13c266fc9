"""What `penstock run-batch` asks queue and scheduler before its run and after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from penstock.address import DEFAULT_QUEUE_ADDRESS
from penstock.batch.runner import not_served
from penstock.batch.summary import EngineTotals, totals_of
from penstock.cli.calls import HOW_TO_START
from penstock.cli.errors import CommandError
from penstock.cli.vain import UNDRAIN, Look, Say, ask_fleet, telling
from penstock.client import Client
from penstock.connection import Patience
from penstock.errors import NobodyAnswers, PenstockError, Unavailable
from penstock.exits import EX_UNAVAILABLE
from penstock.fleet import all_drained
from penstock.limits import BACKOFF_MOST_S, MAX_CURSOR
from penstock.queue.v1 import queue_pb2 as pb

WORKERS_MEET_SCHEDULER_S = 15.0
"""How long workers that are ready may take to appear at the scheduler."""

SUMMARY_TRIES_S = 2.0
"""How long the scheduler is asked for its totals; a run does not fail for want of them."""

ACKS_COME_S = 1.0
"""How long the last completion ACKs are waited for, which come to the scheduler beside the results."""

Unserved: TypeAlias = Callable[[Collection[str]], Mapping[str, int]]
"""Returns the models, of those that are not named, that lines wait for, and the first line of each."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom a run talks to, and how long it waits for them."""

    queue: str
    scheduler: str
    wait_s: float


async def find_queue(peers: Peers, say: Say) -> pb.StatsResponse:
    """Return what the queue tells of itself. Raises CommandError with what to do if no queue answers."""
    try:
        return await _stats(peers, retry_for_s=0)
    except Unavailable as error:
        missing = error
    if peers.wait_s:
        say(f"no queue answers on {peers.queue} yet; waiting for at most {peers.wait_s:g} s")
        try:
            return await _stats(peers, peers.wait_s)
        except Unavailable as error:
            missing = error
    hint = f"; {HOW_TO_START}, or add --up" if isinstance(missing, NobodyAnswers) else ""
    raise CommandError(f"{missing}{hint}", EX_UNAVAILABLE)


async def _stats(peers: Peers, retry_for_s: float) -> pb.StatsResponse:
    async with Client(peers.queue, peers.scheduler, retry_for_s=retry_for_s) as client:
        return await client.stats()


async def tell_what_is_left(client: Client, batch: str, peers: Peers, say: Say) -> None:
    """Say of an earlier batch of the output that a fresh run leaves it in the queue, if some of it still waits or runs.

    It is not cancelled: its answers are somebody's who watches it, or the plain command's once the fresh run has ended.
    """
    left = pb.WatchProgress()
    with suppress(PenstockError):  # of a name that a journal of another version has
        left = await _under_way(client, batch)
    if under_way := left.waiting + left.running:
        say(f"--fresh leaves the batch {batch} in the queue, of which {under_way} requests still wait or run")
        say(f"  to drop    {command_of('cancel', batch, peers.queue)}")


async def _under_way(client: Client, batch: str) -> pb.WatchProgress:
    """Return how many requests of the batch wait and run now."""
    progress = pb.WatchProgress()
    async with aclosing(client.wire_ended(batch, MAX_CURSOR)) as events:
        async for event in events:
            progress = event.progress
    return progress


def tell_what_is_late(count: int, batch: str, queue: str, again: str, say: Say) -> None:
    """Say that so many requests may have answers which the output does not have; `again` is what has them then."""
    say(f"{count} requests of lines with an error have not ended; the output has the errors")
    say(f"  to have their answers later   {again}")
    say(f"  to drop them                  {command_of('cancel', batch, queue)}")


def command_of(name: str, batch: str, queue: str) -> str:
    """Return the command of this name for a batch at the queue at HOST:PORT."""
    return f"penstock {name} --batch {batch}" + (f" --queue {queue}" if queue != DEFAULT_QUEUE_ADDRESS else "")


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the names that the connected workers answer to."""

    names: Collection[str] | None
    """None if there is no scheduler or no worker to ask."""
    is_final: bool = True
    """Whether no worker that lives is missing among those asked."""


async def served_models(peers: Peers, started_here: bool, say: Say) -> Served:
    """Return what is served, once there are workers.

    Why a scheduler does not tell is said: then nobody finds out that a line's model is misspelt.

    Workers that this command started are waited for: they are ready, but may not have met the scheduler yet. They serve
    one model, so the first of them tells all.
    """
    patience = Patience(WORKERS_MEET_SCHEDULER_S if started_here else min(peers.wait_s, SUMMARY_TRIES_S))
    async with Client(peers.queue, peers.scheduler, retry_for_s=0) as client:
        while True:
            look = await ask_fleet(client)
            if look.names:
                return Served(look.names, started_here or not look.young_for_s)
            try:
                await patience.wait_or_raise(Unavailable("no worker"))
            except Unavailable:
                if look.why:
                    say(f"which models are served is not known ({look.why}): lines for one that none serves will wait")
                return Served(None)


async def look_again(peers: Peers, first: Served, say: Say, models: Collection[str]) -> Collection[str] | None:
    """Return what is served once some worker serves each of `models`, or the patience for that is over.

    If `first`, what was known at the start, was not all, the workers that may be about to come back are waited for,
    whatever the patience: no line is to be refused for one of them. Where it is not known in the end what is served,
    `first` counts if it was all; else None is returned, and nothing may be refused.
    """
    patience: Patience | None = None
    async with Client(peers.queue, peers.scheduler, retry_for_s=0) as client:
        while True:
            look = await ask_fleet(client)
            if look.names.issuperset(models):
                return look.names
            if patience is None:
                in_doubt = look.young_for_s > 0 and not first.is_final
                wait_s = max(peers.wait_s, look.young_for_s + BACKOFF_MOST_S) if in_doubt else peers.wait_s
                patience = Patience(wait_s)
                if wait_s:
                    missing = ", ".join(sorted(repr(model) for model in set(models) - look.names))
                    say(f"no worker serves {missing} yet; waiting for at most {round(wait_s, 1):g} s")
            try:
                await patience.wait_or_raise(Unavailable("no worker"))
            except Unavailable:
                if look.names and not look.young_for_s:
                    return look.names
                return first.names if first.is_final else None


def telling_what_waits(
    peers: Peers, batch: str, unserved: Unserved, again: str, say: Say
) -> AbstractAsyncContextManager[None]:
    """Say meanwhile that lines of the batch wait in vain: nobody takes any, or what asks for their model.

    No line is refused for it: its request is in the queue, and a worker may come that takes it. `again` is what the
    user does to have lines refused that no worker serves.
    """

    async def waits(client: Client) -> bool:
        return (await _under_way(client, batch)).waiting > 0

    return telling(peers.queue, peers.scheduler, partial(_in_vain, unserved, again), waits, say)


def _in_vain(unserved: Unserved, again: str, told: Look) -> Iterator[str]:
    """Yield what is to be said of lines that wait."""
    if not told.names:
        yield "no worker is connected"
    elif told.all_drained:
        yield f"{all_drained()}: {UNDRAIN}"
    else:
        for model, line in sorted(unserved(told.names - told.drained).items()):
            asks = f"and line {line} asks for it"
            if model in told.drained:
                yield f"{all_drained(model)}, {asks}: {UNDRAIN}"
            else:
                yield (
                    f"{not_served(model, told.names)}, {asks}; if no worker is to come that serves it, interrupt this "
                    f"and {again}: such lines are then answered with that error"
                )


async def fleet_totals(peers: Peers) -> EngineTotals | None:
    """Return the fleet's totals; None if no scheduler answers."""
    async with Client(peers.queue, peers.scheduler, retry_for_s=SUMMARY_TRIES_S) as client:
        with suppress(PenstockError):
            return totals_of(await client.fleet())
    return None


async def totals_at_the_end(peers: Peers, before: EngineTotals, completions: int) -> EngineTotals | None:
    """Return the fleet's totals once so many completions more have come home than `before`, or after a moment."""
    patience = Patience(ACKS_COME_S)
    while True:
        after = await fleet_totals(peers)
        if after is None or after.ledger.completion_refunds - before.ledger.completion_refunds >= completions:
            return after
        try:
            await patience.wait_or_raise(Unavailable("some completion ACKs"))
        except Unavailable:
            return after


class Late(AbstractContextManager["Late"]):
    """A line that is said if the work takes long; make it inside the event loop."""

    def __init__(self, say: Say, after_s: float) -> None:
        """Have nothing to say yet."""
        self._say, self._after_s = say, after_s
        self._timer: asyncio.TimerHandle | None = None

    def set(self, text: str) -> None:
        """Say `text` in a while."""
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._say, text)

    def __exit__(self, *_: object) -> None:
        """Say it no more."""
        if self._timer is not None:
            self._timer.cancel()
