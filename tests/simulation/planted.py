"""Bugs to be planted in the production code, so that the simulator can show that it finds them.

Nothing in the services knows of them: `plant` puts a broken function in the place of a good one, in this process,
and takes it out again. `make sim PLANT=name` looks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from services.queue.committer import Committer
from services.queue.core import effects as e
from services.queue.core.messages import Complete
from services.queue.core.workers import Workers
from services.queue.items import Item
from services.queue.outlet import Released
from services.queue.storage import recovery, store
from services.scheduler.core.entry import Entry
from services.scheduler.core.fleet import Worker
from services.scheduler.core.ledger import Change, Ledger, Reservation, Verdict
from services.scheduler.core.machine import Machine as SchedulerMachine
from services.scheduler.core.sharing import channel, line
from services.scheduler.core.sharing.rules import Rules
from services.scheduler.core.standing import Standing
from services.worker.core.entry import Entry as Held
from services.worker.core.reservations import Reservations


def _skip_a_refund(stack: ExitStack) -> None:
    """The first release after a second booking of one name is taken for a duplicate: its credits stay booked."""
    book, release = Ledger.book, Ledger.release

    def book_and_note(self: Ledger, request_id: str, *arguments: Any, **options: Any) -> bool:
        again = request_id in self._last_seqs
        booked = book(self, request_id, *arguments, **options)
        if booked and again:
            self.__dict__.setdefault("regranted", set()).add(request_id)
        return booked

    def release_but_once(self: Ledger, request_id: str, seq: int) -> Change:
        if request_id in self.__dict__.get("regranted", ()):
            self.__dict__["regranted"].discard(request_id)
            return Change(Verdict.DUPLICATE)
        return release(self, request_id, seq)

    stack.enter_context(patch.object(Ledger, "book", book_and_note))
    stack.enter_context(patch.object(Ledger, "release", release_but_once))


def _accept_stale_completions(stack: ExitStack) -> None:
    """A completion counts for whatever lease is in force, whatever its token says."""
    complete = Workers.complete

    def complete_anyhow(self: Workers, message: Complete, now_ns: int) -> None:
        entry = self._book.find(message.lease.request_id)
        if entry is not None and entry.seq in self._book.leases:
            message = message.replace(lease=self._book.lease_of(entry))
        complete(self, message, now_ns)

    stack.enter_context(patch.object(Workers, "complete", complete_anyhow))


def _before_sync(stack: ExitStack, *kinds: type) -> None:
    """Effects of these kinds leave the queue when their write begins, not when it is on disk."""
    foretell = Committer._foretell

    async def foretell_more(self: Committer, said: Sequence[e.Effect]) -> bool:
        if early := [effect for effect in said if type(effect) in kinds]:
            self._release(Released(early, {}))
        return await foretell(self, said)

    stack.enter_context(patch.object(Committer, "_foretell", foretell_more))


def _ack_before_sync(stack: ExitStack) -> None:
    """Submits are acknowledged when their write begins, not when it is on disk."""
    _before_sync(stack, e.Submitted)


def _numbers_given_twice(stack: ExitStack) -> None:
    """A start goes on from the last number on disk: what was said of a lost write is said of something else."""
    stack.enter_context(patch.object(recovery, "NUMBERS_SKIPPED", 0))


def _answer_before_sync(stack: ExitStack) -> None:
    """Cancel, delete and requeue are answered before they are on disk."""
    _before_sync(stack, e.Cancelled, e.Deleted, e.Requeued)


def _build_of_doubt(stack: ExitStack) -> None:
    """After a sync that failed the machine is built of what it was about, before the store is opened anew."""
    stack.enter_context(patch.object(Committer, "_built", lambda self: self._build()))


def _tell_what_is_in_doubt(stack: ExitStack) -> None:
    """What is read is told, durable or not."""
    stack.enter_context(patch.object(store, "durably", lambda _, work: work()))


def _look_up_before_the_heal(stack: ExitStack) -> None:
    """What is looked up in the batch that opens the store anew is looked up before that."""
    handle = Committer._handle

    async def look_up_first(self: Committer, items: Sequence[Item]) -> None:
        await handle(self, await self._look_up(items))

    stack.enter_context(patch.object(Committer, "_handle", look_up_first))


def _grant_beyond_the_free(stack: ExitStack) -> None:
    """Under policies that follow the output, which may overcommit, a worker is taken to have 60 blocks too many.

    Only those: under the others the totals of a ledger give it away, and nothing is shown about this check.
    """
    book = Ledger.book
    usable_blocks, reach_blocks = (vars(Worker)[name].fget for name in ("usable_blocks", "reach_blocks"))
    begin = SchedulerMachine.__init__
    too_many_blocks = 0

    def begin_and_note(self: SchedulerMachine, *arguments: Any, **options: Any) -> None:
        nonlocal too_many_blocks
        begin(self, *arguments, **options)
        too_many_blocks = 60 if self.policy.reserve_output_tokens else 0

    def book_anything(
        self: Ledger,
        request_id: str,
        channel: str,
        blocks: int,
        sequences: int = 1,
        guaranteed: bool = False,
        may_overcommit: bool = False,
        last_attempt: bool = False,
    ) -> bool:
        if not too_many_blocks or request_id in self._reservations or blocks <= self.bookable_blocks:
            return book(self, request_id, channel, blocks, sequences, guaranteed, may_overcommit, last_attempt)
        seq = self._last_seqs.pop(request_id, 0)
        self._reservations[request_id] = Reservation(channel, blocks, sequences, seq, guaranteed, last_attempt)
        self.sequences += sequences
        self.last_attempts += last_attempt
        self._move(self._reservations[request_id], blocks)
        return True

    stack.enter_context(patch.object(SchedulerMachine, "__init__", begin_and_note))
    stack.enter_context(patch.object(Ledger, "book", book_anything))

    def more(blocks: Callable[[Worker], int]) -> property:
        return property(lambda worker: blocks(worker) + too_many_blocks)

    stack.enter_context(patch.object(Worker, "usable_blocks", more(usable_blocks)))
    stack.enter_context(patch.object(Worker, "reach_blocks", more(reach_blocks)))


def _last_in_first_out(stack: ExitStack) -> None:
    """A line is ordered by (priority, submit) backwards, wherever it is ordered."""

    def backwards(entry: Entry) -> line.Key:
        return entry.announced.priority, -entry.announced.position, entry.request_id

    stack.enter_context(patch.object(line, "order", backwards))
    stack.enter_context(patch.object(channel, "order", backwards))


def _let_last_attempts_share(stack: ExitStack) -> None:
    """Requests on their last attempt share a worker."""
    stack.enter_context(patch.object(Rules, "has_last", lambda *_: False))


def _still_standing(stack: ExitStack) -> None:
    """A worker takes a standing grant that has met its request for one that still stands."""
    meet = Reservations.meet

    def meet_and_forget(self: Reservations, entry: Held, request_id: str, announced: Any) -> None:
        standing = entry.standing
        meet(self, entry, request_id, announced)
        entry.standing = standing

    stack.enter_context(patch.object(Reservations, "meet", meet_and_forget))


def _stand_for_ever(stack: ExitStack) -> None:
    """What stands unused is not recalled."""
    stack.enter_context(patch.object(Standing, "unused", lambda self, now_ns: []))


PLANTS: dict[str, Callable[[ExitStack], None]] = {
    "skipped-refund": _skip_a_refund,
    "stale-completion": _accept_stale_completions,
    "ack-before-sync": _ack_before_sync,
    "numbers-given-twice": _numbers_given_twice,
    "answer-before-sync": _answer_before_sync,
    "built-of-doubt": _build_of_doubt,
    "told-in-doubt": _tell_what_is_in_doubt,
    "looked-up-before-heal": _look_up_before_the_heal,
    "grant-beyond-free": _grant_beyond_the_free,
    "last-in-first-out": _last_in_first_out,
    "last-attempts-share": _let_last_attempts_share,
    "still-standing": _still_standing,
    "standing-for-ever": _stand_for_ever,
}


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant the bug of this name; an empty name plants none."""
    with ExitStack() as stack:
        if name:
            PLANTS[name](stack)
        yield
