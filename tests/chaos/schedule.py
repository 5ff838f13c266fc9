"""What is done to whom, and when: drawn from a seed before anything starts, so that a failure can be replayed.

A fault comes when so many lines have been answered, not after so many seconds: the same faults then hit the same
part of the work on a fast machine and on a slow one, and none comes after the end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What can be done."""

    KILL = "kill"
    """kill -9; started again after some seconds."""
    KILL_TWICE = "kill-twice"
    """kill -9, and once more while the next life starts."""
    KILL_ENGINE = "kill-engine"
    """kill -9 of a process of the worker, not of the worker itself: the engine core, or the tokenizer."""
    POWER_CUT = "power-cut"
    """kill -9 of all services and clients in one instant."""
    TERMINATE = "terminate"
    """SIGTERM; it must exit with status 0, a client with 130."""
    PAUSE = "pause"
    """SIGSTOP of a process and all its children, SIGCONT after some seconds."""
    CUT = "cut"
    """The connections of a link are reset; new ones are taken at once."""
    REFUSE = "refuse"
    """The connections of a link are reset, and new ones refused for some seconds."""
    STALL = "stall"
    """A link carries nothing for some seconds, and tells nobody."""
    MUTE = "mute"
    """A link carries what is asked and no answers for some seconds."""
    FILL = "fill"
    """The queue's disk is full to the last byte for some seconds."""
    CROWD = "crowd"
    """The queue's disk has less free than the watermark for some seconds."""


class Fault(NamedTuple):
    """One thing that is done."""

    at: int
    """Lines answered, over all clients, when it comes."""
    kind: Kind
    target: str
    """A service, a client, a link ("worker-1>queue"), "disk" or "all"."""
    seconds: float
    """How long it lasts, or how long a killed process stays away."""

    def __str__(self) -> str:
        """Return it as one line of the schedule."""
        return f"at {self.at:>6} answers  {self.kind:<12} {self.target:<18} {self.seconds:4.1f} s"


class Row(NamedTuple):
    """So many faults of a kind, spread over the members of a group."""

    kind: Kind
    group: str
    times: int
    low_s: float
    high_s: float


AWAY_S = (0.0, 2.0)
"""A killed process stays away this long: a supervisor's first pauses."""

BRIEF_S = (0.3, 3.0)
"""Frozen or cut off for less than a lease and less than most grace periods."""

LONG_S = (9.5, 12.0)
"""Frozen or cut off for longer than the lease that the stack gives (`stack.LEASE_S`): another worker takes over."""

FULL: tuple[Row, ...] = (
    Row(Kind.KILL, "queue", 8, *AWAY_S),
    Row(Kind.KILL_TWICE, "queue", 2, 0.1, 0.8),
    Row(Kind.TERMINATE, "queue", 2, *AWAY_S),
    Row(Kind.PAUSE, "queue", 2, *BRIEF_S),
    Row(Kind.KILL, "scheduler", 7, *AWAY_S),
    Row(Kind.KILL_TWICE, "scheduler", 1, 0.1, 0.8),
    Row(Kind.TERMINATE, "scheduler", 2, *AWAY_S),
    Row(Kind.PAUSE, "scheduler", 2, *BRIEF_S),
    Row(Kind.KILL, "worker", 4, *AWAY_S),
    Row(Kind.KILL_ENGINE, "worker", 2, *AWAY_S),
    Row(Kind.TERMINATE, "worker", 2, *AWAY_S),
    Row(Kind.PAUSE, "worker", 2, *BRIEF_S),
    Row(Kind.PAUSE, "worker", 1, *LONG_S),
    Row(Kind.KILL, "client", 8, *AWAY_S),
    Row(Kind.TERMINATE, "client", 2, *AWAY_S),
    Row(Kind.PAUSE, "client", 2, *BRIEF_S),
    Row(Kind.CUT, "link", 7, 0.0, 0.0),
    Row(Kind.REFUSE, "link", 5, *BRIEF_S),
    Row(Kind.STALL, "link", 5, *BRIEF_S),
    Row(Kind.STALL, "work-link", 1, *LONG_S),
    Row(Kind.FILL, "disk", 2, *BRIEF_S),
    Row(Kind.CROWD, "disk", 1, *BRIEF_S),
    Row(Kind.POWER_CUT, "all", 1, *AWAY_S),
)
"""At most 41 kills, a fifth of them of workers and their engines, whose starts take longest; and 38 other faults."""

FROZEN_S = (32.0, 36.0)
"""For longer than a service takes to give up what it calls: 20 s of silence and 10 s without an answer."""

FROZEN_WORKER_S = (52.0, 56.0)
"""The same for queue and scheduler, who are called: 20 s and 30 s."""

EXTENDED: tuple[Row, ...] = (
    *FULL,
    Row(Kind.MUTE, "link", 5, *BRIEF_S),
    Row(Kind.MUTE, "work-link", 2, *LONG_S),
    Row(Kind.PAUSE, "queue", 1, *FROZEN_S),
    Row(Kind.PAUSE, "scheduler", 1, *FROZEN_S),
    Row(Kind.PAUSE, "worker", 1, *FROZEN_WORKER_S),
    Row(Kind.STALL, "link", 2, *FROZEN_S),
)
"""For a run that takes longer anyway."""

SHORT: tuple[Row, ...] = (
    Row(Kind.KILL, "queue", 2, 0.0, 0.3),
    Row(Kind.KILL, "scheduler", 2, 0.0, 0.3),
    Row(Kind.KILL, "worker", 2, 0.0, 0.3),
    Row(Kind.KILL, "client", 2, 0.0, 0.3),
    Row(Kind.PAUSE, "worker", 1, 0.3, 0.6),
    Row(Kind.CUT, "link", 1, 0.0, 0.0),
    Row(Kind.REFUSE, "link", 1, 0.3, 0.6),
)
"""For a test of half a minute."""

FIRST_SHARE, LAST_SHARE = 0.01, 0.85
"""Of the lines: no fault before anything runs, and enough work left for the last one to meet."""


def draw(seed: int, lines: int, rows: Sequence[Row], groups: Mapping[str, Sequence[str]]) -> list[Fault]:
    """Return the faults that `seed` stands for, in order; rows of a group without members are left out.

    The faults of a group are spread evenly over the run, each at a random place of its own stretch, so that one
    that waits for its victim's restart is not overtaken by the next.
    """
    chance = random.Random(seed)
    plans: dict[str, list[tuple[Row, str]]] = {}
    for row in rows:
        members = list(groups.get(row.group, ()))
        chance.shuffle(members)
        for number in range(row.times if members else 0):
            plans.setdefault(row.group, []).append((row, members[number % len(members)]))
    faults = []
    for plan in plans.values():
        chance.shuffle(plan)
        for number, (row, target) in enumerate(plan):
            share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * (number + chance.random()) / len(plan)
            seconds = round(chance.uniform(row.low_s, row.high_s), 1)
            faults.append(Fault(int(share * lines), row.kind, target, seconds))
    return sorted(faults)
