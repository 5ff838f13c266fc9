"""The queue's behaviour as text: commands, and below each what the queue says.

In a transcript a line that starts with `>` is a command; the lines after it, up
to an empty line, are the effects expected from it. Requests are named by their
number. Run with PENSTOCK_WRITE_TRANSCRIPTS=1 to write what the queue says now.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.queue.core import effects as fx
from services.queue.core import records
from services.queue.core.entry import Failure, LeaseRef, request_id_of
from services.queue.core.lifecycle import Outcome
from services.queue.core.messages import (
    BacklogClosed,
    BacklogOpened,
    Cancel,
    Claim,
    Complete,
    GiveBack,
    Message,
    NewRequest,
    Reject,
    Renew,
    RequeueDead,
    SetWindow,
    StoodStill,
    Submit,
    Tick,
    WorkerClosed,
    WorkerOpened,
)
from tests.support.queueing import STORE_ID, Queue, meta

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


class Player:
    """Plays commands to a queue and writes down what it says."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.leases: dict[str, LeaseRef] = {}

    def play(self, line: str) -> list[str]:
        name, *words = line.split()
        if name == "restart":
            self.queue.restart()
            return []
        if name in TIMES:
            self.queue.now_ns += int(words[0])
            return self.say(TIMES[name](int(words[0])))
        return self.say(COMMANDS[name](self, words))

    def say(self, message: Message) -> list[str]:
        return [line for effect in self.queue.step(message) if (line := self.show(effect))]

    def show(self, effect: fx.Effect) -> str:
        if isinstance(effect, fx.Deliver):
            self.leases[f"{number(effect.lease.request_id)}.{effect.lease.attempt}"] = effect.lease
        show = SHOWN.get(type(effect))
        return show(effect) if show else ""

    def lease(self, name: str) -> LeaseRef:
        """Return the lease last given for REQUEST.ATTEMPT."""
        return self.leases[name]


def number(request_id: str) -> int:
    return int(request_id.partition("-")[2], 16)


def name_of(word: str) -> str:
    return request_id_of(STORE_ID, int(word))


def _submit(player: Player, words: list[str]) -> Message:
    fields: dict[str, object] = {}
    for word in words:
        key, _, value = word.partition("=")
        fields[key] = int(value) if value.lstrip("-").isdigit() else value
    made = meta(**fields)
    row = player.queue.store.get(records.IDEMPOTENCY, records.idempotency_key(made.tenant, made.idempotency_key))
    known = records.seq_of(row) if row and made.idempotency_key else None
    return Submit(0, (NewRequest(made, b"", known),))


def _complete(player: Player, words: list[str]) -> Message:
    lease = player.lease(words[1])
    if words[2] == "failure":
        return Complete(int(words[0]), lease, None, Failure("failed", words[3]), None)
    return Complete(int(words[0]), lease, Outcome[words[2].upper()], None, None)


TIMES: dict[str, Callable[[int], Message]] = {
    "wait": lambda _: Tick(),
    "stand_still": StoodStill,
}

COMMANDS: dict[str, Callable[[Player, list[str]], Message]] = {
    "submit": _submit,
    "complete": _complete,
    "worker": lambda p, w: WorkerOpened(int(w[0]), w[1], w[2], tuple(p.lease(name) for name in w[3:])),
    "gone": lambda p, w: WorkerClosed(int(w[0])),
    "claim": lambda p, w: Claim(int(w[0]), name_of(w[1])),
    "renew": lambda p, w: Renew(int(w[0]), tuple(p.lease(name) for name in w[1:])),
    "give_back": lambda p, w: GiveBack(int(w[0]), tuple(p.lease(name) for name in w[1:])),
    "scheduler": lambda p, w: BacklogOpened(int(w[0]), "".join(w[1:2]), sum(map(int, w[2:]))),
    "scheduler_gone": lambda p, w: BacklogClosed(int(w[0])),
    "window": lambda p, w: SetWindow(int(w[0]), w[1], int(w[2]), tuple(w[3:])),
    "reject": lambda p, w: Reject(int(w[0]), name_of(w[1]), Failure("pool_too_small", "9 of 4 blocks")),
    "cancel": lambda p, w: Cancel(0, tuple(name_of(word) for word in w)),
    "requeue_dead": lambda p, w: RequeueDead(0, tuple(name_of(word) for word in w)),
}


def _lease(lease: LeaseRef) -> str:
    return f"{number(lease.request_id)}.{lease.attempt}"


SHOWN: dict[type, Callable[..., str]] = {
    fx.Submitted: lambda e: " ".join(f"{'accepted' if new else 'duplicate'} {number(i)}" for i, new in e.acks),
    fx.Deliver: lambda e: f"to {e.stream}: deliver {_lease(e.lease)} token {e.lease.fencing_token}",
    fx.Refused: lambda e: f"to {e.stream}: refused {number(e.request_id)} {e.reason.name}",
    fx.StopRun: lambda e: f"to {e.stream}: cancel {_lease(e.lease)} {e.reason.name}",
    fx.Recorded: lambda e: f"to {e.stream}: recorded {_lease(e.lease)} {'yes' if e.accepted else 'no'}",
    fx.Announce: lambda e: f"to {e.stream}: announce {number(e.request_id)} attempt {e.attempt}",
    fx.Gone: lambda e: f"to {e.stream}: gone {number(e.request_id)} {e.reason.name}",
    fx.EndStream: lambda e: f"to {e.stream}: end ({e.reason})",
    fx.NameTaken: lambda e: f"to {e.stream}: end, another {e.worker_id} is connected",
    fx.SchedulerTaken: lambda e: f"to {e.stream}: end, another scheduler is connected",
    fx.Ended: lambda e: f"ended {number(e.request_id)} {e.outcome.name} attempts {e.attempts} at {e.completion_seq}",
    fx.WentBack: lambda e: f"waits again ({e.cause})",
    fx.StaleCompletion: lambda e: "stale completion counted",
    fx.Cancelled: lambda e: f"cancelled {e.cancelled} aborting {e.aborting} not {len(e.not_cancelled)}",
    fx.Requeued: lambda e: f"requeued {e.requeued} not dead {len(e.not_dead)}",
}


def played(text: str) -> str:
    """Return the transcript with every answer replaced by what the queue says."""
    player = Player()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            out += ["", line, *player.play(line[1:].strip())]
        elif line.startswith("#"):
            out += ["", line]
    return "\n".join(out).strip() + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    said = played(text)
    if os.environ.get("PENSTOCK_WRITE_TRANSCRIPTS"):
        path.write_text(said)
    assert said == path.read_text()


def test_there_are_transcripts() -> None:
    assert TRANSCRIPTS
