"""Every reservation and lease of this worker, and the moves the lifecycle table allows."""

from __future__ import annotations

from typing import Any

from services.core.drain import NEVER_ASKED, Drain
from services.worker.core import messages as m
from services.worker.core.engine_view import EngineView
from services.worker.core.entry import Counters, Entry
from services.worker.core.lifecycle import IN_ENGINE, ON_OFFER, TABLE, Action, Input, State
from services.worker.core.messages import Cause, Ending
from services.worker.core.peers import Peers
from services.worker.core.token_news import TokenNews


class Reservations:
    """Reservations by request, leases by run; an attempt is in both while it holds credits under a lease.

    A reservation leaves in `_release` and nowhere else, so each is released once.
    """

    def __init__(self, out: list[m.Effect], peers: Peers, view: EngineView, counters: Counters) -> None:
        """Hold nothing; write effects to `out`."""
        self.by_request: dict[str, Entry] = {}
        self.by_run: dict[str, Entry] = {}
        self.unclaimed: dict[str, Entry] = {}
        """Grants whose claim has not been sent, oldest first."""
        self.token_news = TokenNews()
        self.drain = NEVER_ASKED
        """What operators were last heard to ask; kept for the next scheduler."""
        self.leaving = False
        """Whether nothing new is taken for the rest of this life."""
        self.in_engine = 0
        self.claiming = 0
        self._successors: dict[str, m.Granted] = {}
        self._out = out
        self._peers = peers
        self._view = view
        self._counters = counters

    @property
    def open(self) -> bool:
        """Whether new grants are taken."""
        return not (self.drain.wanted or self.leaving)

    def grant(self, message: m.Granted, now_ns: int) -> None:
        """Take a grant: claim it, keep it until it can be claimed, or return it if nothing new is taken.

        The ledger has one booking per request. If an earlier run of the request
        is still here, the booking is this grant's now: that run will leave
        without an ACK, and then the grant is taken up.
        """
        if message.request_id in self.by_request:
            self._successors[message.request_id] = message
            self._counters.successors += 1
            return
        self._counters.grants += 1
        entry = Entry(
            request_id=message.request_id,
            channel=message.channel,
            booked_blocks=message.booked_blocks,
            settles=message.settles,
            granted_ns=now_ns,
            reserve_output_tokens=message.reserve_output_tokens,
            standing=message.standing,
            completions=message.completions,
            guaranteed=message.guaranteed,
            last_attempt=message.last_attempt,
        )
        self.by_request[entry.request_id] = entry
        self.unclaimed[entry.request_id] = entry
        if message.standing is not None:
            self._offer(entry, now_ns)
        elif self.open:
            self.claim_what_fits(now_ns)
        else:
            self.move(entry, Input.UNCLAIM, now_ns, Cause.UNCLAIMED)

    def _offer(self, entry: Entry, now_ns: int) -> None:
        """Offer a standing grant, or return it: it keeps nobody waiting."""
        if self.open and self._peers.takes_offers:
            self.move(entry, Input.OFFER, now_ns)
        else:
            self.move(entry, Input.UNCLAIM, now_ns, Cause.RECALLED)

    def meet(self, entry: Entry, request_id: str, announced: Any) -> None:
        """Give the reservation of a standing grant to the request that it has met."""
        grant = entry.request_id
        self.by_request[request_id] = self.by_request.pop(grant)
        entry.request_id = request_id
        entry.standing = None
        self._peers.grant_used(grant, announced)

    def recall(self, request_id: str, now_ns: int) -> None:
        """Give a grant back unless its claim is on its way."""
        self._successors.pop(request_id, None)
        entry = self.by_request.get(request_id)
        if entry is None:
            self._counters.ignored += 1
        else:
            self.move(entry, Input.RECALL, now_ns, Cause.RECALLED)

    def hear_drain(self, asked: Drain, now_ns: int) -> None:
        """Do what operators ask, unless a later word of theirs is known."""
        self.drain = max(self.drain, asked)
        if not self.open:
            self._return_all(now_ns)

    def leave(self, now_ns: int) -> None:
        """Take nothing new for the rest of this life."""
        self.leaving = True
        self._return_all(now_ns)

    def _return_all(self, now_ns: int) -> None:
        """Return what has not been claimed, and want back what stands ready."""
        self.return_unclaimed(list(self.unclaimed.values()), now_ns)
        self.withdraw(now_ns)

    def withdraw(self, now_ns: int) -> None:
        """Want all standing grants back."""
        for entry in self.on_offer():
            self.move(entry, Input.RECALL, now_ns, Cause.RECALLED)

    def on_offer(self) -> list[Entry]:
        """Return the standing grants."""
        return [entry for entry in self.by_request.values() if entry.state in ON_OFFER]

    def return_unclaimed(self, entries: list[Entry], now_ns: int) -> None:
        """Return grants to the scheduler; their requests still wait."""
        for entry in entries:
            self.move(entry, Input.UNCLAIM, now_ns, Cause.UNCLAIMED)

    def claim_what_fits(self, now_ns: int) -> None:
        """Claim waiting grants, oldest first, as far as the queue allows leases."""
        if not (self.open and self._peers.queue_up):
            return
        while self.unclaimed and self.claiming + len(self.by_run) < self._peers.max_inflight:
            self.move(next(iter(self.unclaimed.values())), Input.CLAIM, now_ns)

    def leases(self) -> tuple[m.Lease, ...]:
        """Return every lease held."""
        return tuple(entry.the_lease for entry in self.by_run.values())

    def in_states(self, *states: State) -> list[Entry]:
        """Return the leased entries in one of `states`."""
        return [entry for entry in self.by_run.values() if entry.state in states]

    def move(
        self, entry: Entry, what: Input, now_ns: int, cause: Cause | None = None, ending: Ending | None = None
    ) -> None:
        """Apply one line of the lifecycle table; what it does not list changes nothing and is counted.

        `cause` and `ending` are what the peers will hear, if they are given.
        """
        line = TABLE.get((entry.state, what))
        if line is None:
            self._counters.ignored += 1
            return
        before, after = entry.state, line[0]
        entry.state = after
        if cause is not None:
            entry.cause = cause
        if ending is not None:
            entry.ending = ending
        self._moved(entry, before, after)
        for action in line[1]:
            self._act(entry, action, now_ns)
        if before in IN_ENGINE and not self.in_engine:
            self._view.emptied(now_ns)

    def _moved(self, entry: Entry, before: State, after: State) -> None:
        """Keep what follows from the states of all."""
        self.in_engine += (after in IN_ENGINE) - (before in IN_ENGINE)
        self.claiming += (after is State.CLAIMING) - (before is State.CLAIMING)
        if before is State.GRANTED:
            del self.unclaimed[entry.request_id]

    def _act(self, entry: Entry, action: Action, now_ns: int) -> None:
        if action is Action.RELEASE:
            self._release(entry, now_ns)
        elif action is Action.COMPLETE:
            self._complete(entry)
        elif action is Action.GIVE_BACK:
            self.give_back(entry.the_lease, "not run")
        elif action is Action.FORGET:
            self._forget(entry, now_ns)
        elif action is Action.CLAIM_MORE:
            self.claim_what_fits(now_ns)
        else:
            self._say(entry, action)

    def _say(self, entry: Entry, action: Action) -> None:
        """Do an action that changes nothing here."""
        if action is Action.SEND_CLAIM:
            self._out.append(m.SendClaim(entry.request_id))
        elif action is Action.SEND_OFFER:
            assert entry.standing is not None, "only a standing grant is offered"
            self._out.append(m.SendOffer(entry.request_id, entry.channel, entry.standing))
        elif action is Action.SEND_WITHDRAW:
            self._out.append(m.SendWithdraw(entry.request_id))
        elif action is Action.TOKENIZE:
            self._out.append(m.Tokenize(entry.run_id))
        elif action is Action.DROP_PROMPT:
            self._out.append(m.DropPrompt(entry.run_id))
        elif action is Action.START:
            self._out.append(
                m.StartEngine(entry.run_id, entry.max_tokens, entry.held_blocks, entry.tell_at_tokens, entry.guaranteed)
            )
        else:
            assert action is Action.ABORT, action
            self._out.append(m.AbortEngine(entry.run_id))

    def _release(self, entry: Entry, now_ns: int) -> None:
        """Send the credits home, once; the first thing done when an attempt ends."""
        del self.by_request[entry.request_id]
        self._counters.released(entry.cause)
        self._peers.forget_growth(entry.request_id)
        successor = self._successors.pop(entry.request_id, None)
        if successor is None:
            self._peers.release(entry)
        else:
            self.grant(successor, now_ns)

    def _complete(self, entry: Entry) -> None:
        """Tell the queue how the attempt ended, or keep it until that is there."""
        run_id = entry.run_id
        self.token_news.drop(run_id)
        if self._peers.queue_up:
            if entry.watched:
                self._out.append(m.SendTokens(run_id))
            self._out.append(m.SendComplete(run_id, entry.the_ending, entry.credits()))
        else:
            self._out.append(m.KeepComplete(run_id, entry.the_ending, entry.credits()))

    def give_back(self, lease: m.Lease, reason: str) -> None:
        """Hand a lease back."""
        self._counters.given_back += 1
        self._peers.give_back(lease, reason)

    def _forget(self, entry: Entry, now_ns: int) -> None:
        run_id = entry.run_id
        del self.by_run[run_id]
        self.token_news.drop(run_id)
        self._out.append(m.Forget(run_id))
        self.claim_what_fits(now_ns)
