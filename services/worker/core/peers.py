"""The session's two streams: which is open, and what may be sent on it now."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from services.core.drain import Drain
from services.worker.core import messages as m
from services.worker.core.engine_view import EngineView
from services.worker.core.entry import Entry


class Stream(Enum):
    """Where a stream is in its life."""

    DOWN = "down"
    OPENING = "opening"
    UP = "up"


GROWTH_WAIT_NS = 20_000_000
"""Longest that growth waits for company, whatever the reports' interval: a step or two of an engine, as old as a grant
is when it arrives."""


Ack: TypeAlias = m.SendTokenizerAck | m.SendCompletionAck | m.SendGrantUsed
"""What tells of a reservation, in the order of what happens to it."""


class Peers:
    """Writes effects for scheduler and queue, as far as their streams are open.

    ACKs are not kept while the Credits stream is down, for the inventory of the
    next open says the same. Between that open and its answer the epoch is not
    known yet: ACKs of this gap wait and go out first, in order.
    """

    def __init__(self, out: list[m.Effect]) -> None:
        """Write to `out`, the effects of the step in progress."""
        self._out = out
        self._credits = Stream.DOWN
        self._work = Stream.DOWN
        self._epoch = 0
        self._seq = 0
        self._waiting_acks: list[Ack] = []
        self._growth: dict[str, tuple[Entry, m.SendTokenizerAck]] = {}
        """By request, of those that go on: they travel with the next ACK of another kind or the next report."""
        self._acked = False
        self._lease_ns = 0
        self._renewed_ns = 0
        self.report_interval_ns = 0
        self.max_inflight = 0
        self._takes_offers = False
        self._given_back: list[m.Lease] = []
        """Leases that are to be handed back as soon as the queue listens; until then it takes them for held."""

    @property
    def scheduler_up(self) -> bool:
        """Whether ACKs reach the scheduler."""
        return self._credits is Stream.UP

    @property
    def growing(self) -> bool:
        """Whether the scheduler is still to be told of reservations that grew."""
        return bool(self._growth)

    @property
    def interval_ns(self) -> int:
        """Time from the last report to the next one."""
        return min(self.report_interval_ns, GROWTH_WAIT_NS) if self._growth else self.report_interval_ns

    @property
    def queue_up(self) -> bool:
        """Whether the queue listens."""
        return self._work is Stream.UP

    @property
    def takes_offers(self) -> bool:
        """Whether the queue listens, and knows offers."""
        return self.queue_up and self._takes_offers

    @property
    def renew_due_ns(self) -> int:
        """When the leases are to be renewed: three times in a lease, so that two renewals may get lost."""
        return self._renewed_ns + self._lease_ns // 3

    # ---- scheduler ----

    def open_credits(self, inventory: tuple[m.Holding, ...], drain: Drain, leaving: bool) -> None:
        """Open the Credits stream with the whole inventory, and what keeps grants away."""
        self._credits = Stream.OPENING
        self._waiting_acks.clear()
        self._out.append(m.OpenCredits(inventory, drain, leaving))

    def credits_opened(self, epoch: int, report_interval_ns: int) -> None:
        """Take the new epoch and send the ACKs that waited for it."""
        self._credits = Stream.UP
        self._epoch = epoch
        self.report_interval_ns = report_interval_ns
        self._out.extend(ack.replace(epoch=epoch) for ack in self._waiting_acks)
        self._acked = self._acked or any(isinstance(ack, m.SendCompletionAck) for ack in self._waiting_acks)
        self._waiting_acks.clear()

    def credits_closed(self) -> None:
        """Drop what waited; the next inventory replaces it."""
        self._credits = Stream.DOWN
        self._waiting_acks.clear()
        self._growth.clear()

    def settle(self, entry: Entry, reserved_tokens: int, generated_tokens: int) -> None:
        """Send a TokenizerAck with what `entry` holds from now on; tokens are per completion.

        The first is sent at once. One by which a running request grew waits for company: some run grows in nearly
        every step, and a frame of its own costs both ends more than all that is in it.
        """
        ack = m.SendTokenizerAck(
            self._epoch,
            entry.request_id,
            self._next_seq(entry),
            entry.held_blocks,
            entry.prompt_tokens,
            reserved_tokens * entry.completions,
            generated_tokens * entry.completions,
            entry.max_tokens * entry.completions,
        )
        if generated_tokens and self._credits is Stream.UP:
            self._growth.pop(entry.request_id, None)  # sequence numbers go out in order
            self._growth[entry.request_id] = entry, ack
        else:
            entry.tokenizer_acks += 1
            self._send_ack(ack)

    def grant_used(self, grant: str, announced: Any) -> None:
        """Tell whose a standing grant is from now on."""
        self._send_ack(m.SendGrantUsed(self._epoch, grant, announced))

    def forget_growth(self, request_id: str) -> None:
        """Leave out what was still to be told of a run that ends: its credits go home, or to a later grant."""
        self._growth.pop(request_id, None)

    def release(self, entry: Entry) -> None:
        """Send a CompletionAck for `entry`."""
        self._send_ack(
            m.SendCompletionAck(
                self._epoch,
                entry.request_id,
                self._next_seq(entry),
                entry.cause,
                entry.output_tokens,
                entry.preemptions,
            )
        )
        self._acked = self._acked or self._credits is Stream.UP

    def report(self, view: EngineView, now_ns: int) -> None:
        """Send the engine's report if it is due.

        A wake-up that released credits or told of growth always reports, so that the scheduler's
        engine view is never older than its ledger; others keep the interval.
        """
        if self._credits is not Stream.UP:
            self._acked = False
            return
        news = view.changed or self.growing
        if self._acked or (news and now_ns >= view.due_ns(self.interval_ns)):
            self._tell_growth()
            self._acked = False
            self._out.append(view.report(self._epoch, now_ns))

    def _next_seq(self, entry: Entry) -> int:
        # One sequence for all requests: it grows for each of them, also over a second grant of the same one.
        self._seq += 1
        entry.seq = self._seq
        return self._seq

    def _send_ack(self, ack: Ack) -> None:
        if self._credits is Stream.UP:
            self._tell_growth()
            self._out.append(ack)
        elif self._credits is Stream.OPENING:
            self._waiting_acks.append(ack)

    def _tell_growth(self) -> None:
        for entry, ack in self._growth.values():
            entry.tokenizer_acks += 1
            self._out.append(ack)
            self._acked = True
        self._growth.clear()

    # ---- queue ----

    def open_work(self, held: tuple[m.Lease, ...]) -> None:
        """Open the Work stream with every lease still held, and those that could not be handed back."""
        self._work = Stream.OPENING
        self._out.append(m.OpenWork((*held, *self._given_back)))

    def work_opened(self, lease_ns: int, max_inflight: int, takes_offers: bool, now_ns: int) -> None:
        """Take the queue's limits, and hand back what waited for it; opening renewed every lease."""
        if self._given_back:
            self._out.append(m.SendGiveBack(tuple(self._given_back), "not run"))
            self._given_back.clear()
        self._takes_offers = takes_offers
        self._work = Stream.UP
        self._lease_ns = lease_ns
        self._renewed_ns = now_ns
        self.max_inflight = max_inflight

    def give_back(self, lease: m.Lease, reason: str) -> None:
        """Hand a lease back, later if the queue does not listen: else it would be lost, and the attempt with it."""
        if self.queue_up:
            self._out.append(m.SendGiveBack((lease,), reason))
        else:
            self._given_back.append(lease)

    @property
    def owes_queue(self) -> bool:
        """Whether leases wait to be handed back."""
        return bool(self._given_back)

    def work_closed(self) -> None:
        """Note that the queue does not listen."""
        self._work = Stream.DOWN

    def renew(self, leases: tuple[m.Lease, ...], now_ns: int) -> None:
        """Renew `leases`."""
        self._renewed_ns = now_ns
        if leases:
            self._out.append(m.SendRenew(leases))
