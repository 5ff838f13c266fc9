"""Life of one granted request on its worker, as a table.

Credits are held in every state up to the one that releases them; a lease is
held from `TOKENIZING` to the end. What the table does not list is refused:
nothing changes and the input is counted.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    """Where a granted request is."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    GRANTED = "granted"
    """Credits booked; the claim has not been sent."""
    CLAIMING = "claiming"
    """The claim is on its way to the queue."""
    OFFERED = "offered"
    """Standing ready for a request that is yet to come."""
    WITHDRAWING = "withdrawing"
    """The offer is being taken back; a request may be on its way all the same."""
    TOKENIZING = "tokenizing"
    """Leased; the prompt's length is being found out."""
    RUNNING = "running"
    """In the engine."""
    CANCELLING = "cancelling"
    """Being aborted in the engine; a completion will tell the queue."""
    DROPPING = "dropping"
    """Being aborted in the engine; the lease is lost, the queue hears nothing."""
    HANDING_BACK = "handing-back"
    """Being aborted in the engine; the lease goes back to the queue unharmed."""
    FINISHING = "finishing"
    """Credits are home; the completion waits to be recorded."""
    GONE = "gone"
    """Nothing is held."""


class Input(Enum):
    """What can happen to a granted request."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    CLAIM = "claim"
    OFFER = "offer"
    RECALL = "recall"
    UNCLAIM = "unclaim"
    DELIVER = "deliver"
    REFUSE = "refuse"
    FIT = "fit"
    END = "end"
    CANCEL = "cancel"
    LOSE = "lose"
    HAND_BACK = "hand-back"
    ABORTED = "aborted"
    RECORD = "record"


class Action(Enum):
    """What the session does on a transition, one after the other."""

    __hash__ = object.__hash__  # as good for singletons as Enum's own, which is a call into Python at every look-up

    SEND_CLAIM = "send-claim"
    SEND_OFFER = "send-offer"
    SEND_WITHDRAW = "send-withdraw"
    TOKENIZE = "tokenize"
    DROP_PROMPT = "drop-prompt"
    """The prompt may still wait to be rendered."""
    START = "start"
    ABORT = "abort"
    RELEASE = "release"
    """Send the credits home."""
    COMPLETE = "complete"
    """Tell the queue how the attempt ended."""
    GIVE_BACK = "give-back"
    """Hand the lease back."""
    FORGET = "forget"
    """Let go of the lease, and claim what there is room for."""
    CLAIM_MORE = "claim-more"
    """Claim what there is room for."""


TABLE: Final[dict[tuple[State, Input], tuple[State, tuple[Action, ...]]]] = {
    (State.GRANTED, Input.CLAIM): (State.CLAIMING, (Action.SEND_CLAIM,)),
    (State.GRANTED, Input.RECALL): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.GRANTED, Input.UNCLAIM): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.GRANTED, Input.OFFER): (State.OFFERED, (Action.SEND_OFFER,)),
    (State.OFFERED, Input.RECALL): (State.WITHDRAWING, (Action.SEND_WITHDRAW,)),
    (State.OFFERED, Input.UNCLAIM): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.OFFERED, Input.REFUSE): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.OFFERED, Input.DELIVER): (State.TOKENIZING, (Action.TOKENIZE,)),
    (State.WITHDRAWING, Input.RECALL): (State.WITHDRAWING, ()),
    (State.WITHDRAWING, Input.UNCLAIM): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.WITHDRAWING, Input.REFUSE): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.WITHDRAWING, Input.DELIVER): (State.TOKENIZING, (Action.TOKENIZE,)),
    # Too late to recall: the claim's answer decides.
    (State.CLAIMING, Input.RECALL): (State.CLAIMING, ()),
    (State.CLAIMING, Input.UNCLAIM): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.CLAIMING, Input.REFUSE): (State.GONE, (Action.RELEASE, Action.CLAIM_MORE)),
    (State.CLAIMING, Input.DELIVER): (State.TOKENIZING, (Action.TOKENIZE,)),
    (State.TOKENIZING, Input.FIT): (State.RUNNING, (Action.START,)),
    (State.TOKENIZING, Input.END): (State.FINISHING, (Action.RELEASE, Action.COMPLETE)),
    (State.TOKENIZING, Input.CANCEL): (State.FINISHING, (Action.DROP_PROMPT, Action.RELEASE, Action.COMPLETE)),
    (State.TOKENIZING, Input.LOSE): (State.GONE, (Action.DROP_PROMPT, Action.RELEASE, Action.FORGET)),
    (State.TOKENIZING, Input.HAND_BACK): (
        State.GONE,
        (Action.DROP_PROMPT, Action.RELEASE, Action.GIVE_BACK, Action.FORGET),
    ),
    (State.RUNNING, Input.END): (State.FINISHING, (Action.RELEASE, Action.COMPLETE)),
    (State.RUNNING, Input.CANCEL): (State.CANCELLING, (Action.ABORT,)),
    (State.RUNNING, Input.LOSE): (State.DROPPING, (Action.ABORT,)),
    (State.RUNNING, Input.HAND_BACK): (State.HANDING_BACK, (Action.ABORT,)),
    # The abort is on its way already; only what the queue will hear changes.
    (State.CANCELLING, Input.LOSE): (State.DROPPING, ()),
    (State.HANDING_BACK, Input.LOSE): (State.DROPPING, ()),
    (State.HANDING_BACK, Input.CANCEL): (State.CANCELLING, ()),
    (State.CANCELLING, Input.ABORTED): (State.FINISHING, (Action.RELEASE, Action.COMPLETE)),
    (State.DROPPING, Input.ABORTED): (State.GONE, (Action.RELEASE, Action.FORGET)),
    (State.HANDING_BACK, Input.ABORTED): (State.GONE, (Action.RELEASE, Action.GIVE_BACK, Action.FORGET)),
    (State.FINISHING, Input.RECORD): (State.GONE, (Action.FORGET,)),
    (State.FINISHING, Input.LOSE): (State.GONE, (Action.FORGET,)),
}

ON_OFFER: Final = frozenset({State.OFFERED, State.WITHDRAWING})
"""States of a standing grant that the queue knows of."""

IN_ENGINE: Final = frozenset({State.RUNNING, State.CANCELLING, State.DROPPING, State.HANDING_BACK})
"""States in which the engine may hold blocks of the request."""
