"""What the requests in line wait for: blocks, the demand side of credit starvation, or a model that nobody serves."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.sharing.channel import Channel
from services.scheduler.core.sharing.line import Line

SAMPLE_REQUESTS: Final = 16
"""Requests of a line that are asked for their need; the others are taken to be like them."""

SAMPLES_PER_LOOK: Final = 512
"""Requests of all lines that are asked at one look, five of which are taken a second: a policy's forecast takes some
ten microseconds a request. 32 long lines are asked each time, of more each has its turn: 640 come round in four
seconds."""

MOST_UNSERVED_NAMES = 100
"""Models nobody serves that are told apart; whoever makes names up shall not fill metrics and logs with them."""

PLACE_NS: Final = 3_600_000_000_000
"""How long the name of a model has a place there after the last request that waited for it. Every name
that ever had one stays in the index of whoever scrapes: made-up ones come to 2,400 a day there."""

OTHER_MODELS = "(others)"
"""What the rest of them is counted under."""


class Demand(NamedTuple):
    """What waits, as one look at all lines has found it. Models are those asked for; "" is any."""

    blocks: dict[tuple[str, str], int]
    """Blocks that it is expected to need, by channel and model."""
    unserved: dict[str, int]
    """Requests that wait for a model no worker serves, by model; OTHER_MODELS are those without a place."""


class Waiting:
    """Adds up what lines need. Owns what was asked of each, by the line whose turn is longest ago first."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        """Ask `policy` what requests need of workers of `fleet`."""
        self._fleet = fleet
        self._policy = policy
        self._asked: dict[Line, tuple[int, Counter[str]]] = {}
        """How many requests were asked, and the blocks that those of each channel among them need."""

    def blocks(self, channels: Iterable[Channel]) -> dict[tuple[str, str], int]:
        """Return the blocks that the requests of `channels`, all there are, are expected to need, by channel and model.

        As many lines are asked as SAMPLES_PER_LOOK reaches; the others need by the request what they did when they
        were, and one that was never asked counts when it has its turn. Requests for a model that nobody serves have no
        size yet: they count in `unserved`.
        """
        served = dict.fromkeys(line for channel in channels for line in served_lines(channel, self._fleet))
        self._asked = {line: asked for line, asked in self._asked.items() if line in served}
        samples = 0
        for line in [line for line in served if line not in self._asked] + list(self._asked):
            if samples >= SAMPLES_PER_LOOK:
                break
            self._asked.pop(line, None)
            asked = self._asked[line] = self._ask(line)
            samples += asked[0]
        needed: Counter[tuple[str, str]] = Counter()
        for line, (requests, asked_blocks) in self._asked.items():
            for channel, blocks in asked_blocks.items():
                needed[channel, line.model] += -(-blocks * len(line) // requests)
        return dict(needed)

    def _ask(self, line: Line) -> tuple[int, Counter[str]]:
        worker = next(iter(self._fleet.serving(line.model)[0].workers.values()))
        sample = line.sample(SAMPLE_REQUESTS)
        blocks: Counter[str] = Counter()
        for request in (entry.announced for entry in sample):
            blocks[request.channel] += self._policy.expected_blocks(request, worker)
        return len(sample), blocks


class Unserved:
    """The requests that wait for models no worker serves, as they are when that is asked; "" is any model.

    Callers make names up, thousands of them, which are looked at only where it is asked `by_model`.
    """

    def __init__(self, channels: Iterable[Channel], fleet: Fleet) -> None:
        """Look at `channels`, all there are."""
        self._channels = list(channels)
        self._fleet = fleet

    def __len__(self) -> int:
        """Return how many there are."""
        waiting = sum(map(len, self._channels))
        return waiting - sum(len(line) for channel in self._channels for line in served_lines(channel, self._fleet))

    def of(self, model: str) -> int:
        """Return how many there are for one model, none if somebody serves it."""
        if self._fleet.serving(model):
            return 0
        lines = [line for channel in self._channels if (line := channel.lines.get(model)) is not None]
        return sum(map(len, lines))

    def by_model(self) -> dict[str, int]:
        """Return how many there are for each model."""
        counts: dict[str, int] = {}
        for channel in self._channels:
            for model, line in channel.lines.items():
                if not self._fleet.serving(model):
                    counts[model] = counts.get(model, 0) + len(line)
        return counts


class UnservedNames:
    """Gives models that nobody serves a place in status, metrics and log.

    Owns which have one, and when each was waited for last.
    """

    def __init__(self) -> None:
        """Begin with no name."""
        self._waited_ns: dict[str, int] = {}

    def tell(self, unserved: Unserved, now_ns: int) -> tuple[dict[str, int], list[str]]:
        """Return how many wait for each, those without a place under OTHER_MODELS, and which names are newly told of.

        While places are free new names get one, those that most requests wait for first. Where none is free those
        without are counted together and not looked at.
        """
        self._waited_ns = {name: at_ns for name, at_ns in self._waited_ns.items() if now_ns - at_ns < PLACE_NS}
        told = {name: count for name in {"": 0, **self._waited_ns} if (count := unserved.of(name))}
        others = len(unserved) - sum(told.values())
        free = MOST_UNSERVED_NAMES - len(self._waited_ns.keys() - {"", OTHER_MODELS})
        if others and free > 0:
            rest = [each for each in unserved.by_model().items() if each[0] not in told]
            told.update(heapq.nlargest(free, rest, key=lambda each: each[1]))
            others = len(unserved) - sum(told.values())
        if others:
            told[OTHER_MODELS] = told.get(OTHER_MODELS, 0) + others
        new = [name for name in told if name not in self._waited_ns]
        self._waited_ns.update(dict.fromkeys(told, now_ns))
        return told, new


def served_lines(channel: Channel, fleet: Fleet) -> list[Line]:
    """Return the lines of a channel for models that somebody serves, by whatever is fewer, such models or lines."""
    served, lines = fleet.served(), channel.lines
    if len(served) < len(lines):
        return [line for model in served if (line := lines.get(model)) is not None]
    return [line for model, line in lines.items() if fleet.serving(model)]
