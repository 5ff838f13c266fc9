"""Bugs to be planted in the production code, so that the simulator can show that it finds them.

Nothing in the services knows of them: `plant` puts a broken function in the place of a good one, in this process,
and takes it out again. `make sim PLANT=name` looks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from services.queue.committer import Committer, Released
from services.queue.core import effects as e
from services.queue.core.messages import Complete, Message
from services.queue.core.workers import Workers
from services.scheduler.core.ledger import Change, Ledger, Verdict


def _skip_a_refund(stack: ExitStack) -> None:
    """The first release after a second booking of one name is taken for a duplicate: its credits stay booked."""
    book, release = Ledger.book, Ledger.release

    def book_and_note(self: Ledger, request_id: str, channel: str, blocks: int, sequences: int = 1) -> bool:
        again = request_id in self._last_seqs
        booked = book(self, request_id, channel, blocks, sequences)
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
            message = message._replace(lease=self._book.lease_of(entry))
        complete(self, message, now_ns)

    stack.enter_context(patch.object(Workers, "complete", complete_anyhow))


def _ack_before_sync(stack: ExitStack) -> None:
    """Submits are acknowledged when their write begins, not when it is on disk."""

    async def commit(self: Committer, messages: Sequence[Message]) -> None:
        now_ns = self._clock.now_ns()
        everything = [effect for message in messages for effect in self.machine.step(message, now_ns)]
        sealed = self.machine.seal()
        rows = [effect for effect in everything if isinstance(effect, e.Write | e.PutResult)]
        acks = [effect for effect in everything if isinstance(effect, e.Submitted)]
        rest: list[e.Effect] = [effect for effect in everything if not isinstance(effect, e.Write | e.Submitted)]
        wanted = [effect.seq for effect in rest if isinstance(effect, e.Deliver)]
        self._release(Released(list(acks), {}, {}))
        payloads: dict[int, bytes] = {}
        if rows:
            rows.append(sealed.counters)
            payloads = await self._off_loop(lambda: self._write(rows, wanted))
        self._release(Released(rest, payloads, sealed.progress))

    stack.enter_context(patch.object(Committer, "_commit", commit))


PLANTS: dict[str, Callable[[ExitStack], None]] = {
    "skipped-refund": _skip_a_refund,
    "stale-completion": _accept_stale_completions,
    "ack-before-sync": _ack_before_sync,
}


@contextmanager
def plant(name: str) -> Iterator[None]:
    """Plant the bug of this name; an empty name plants none."""
    with ExitStack() as stack:
        if name:
            PLANTS[name](stack)
        yield
