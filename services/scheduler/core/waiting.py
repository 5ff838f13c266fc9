"""What the requests in line wait for: blocks, the demand side of credit starvation, or a model that nobody serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Fleet
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

    def blocks(self, lines: Iterable[Line]) -> dict[tuple[str, str], int]:
        """Return the blocks that the requests in `lines`, all there are, are expected to need, by channel and model.

        As many lines are asked as SAMPLES_PER_LOOK reaches; the others need by the request what they did when they
        were, and one that was never asked counts when it has its turn. Requests for a model that nobody serves have no
        size yet: they count in `unserved`.
        """
        served = dict.fromkeys(line for line in lines if self._fleet.serving(line.model))
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


class UnservedNames:
    """Gives models that nobody serves a place in status, metrics and log.

    Owns which have one, and when each was waited for last.
    """

    def __init__(self) -> None:
        """Begin with no name."""
        self._waited_ns: dict[str, int] = {}

    def tell(self, counts: Mapping[str, int], now_ns: int) -> tuple[dict[str, int], list[str]]:
        """Return `counts` with those of names without a place under OTHER_MODELS, and which names are newly told of.

        While places are free new names get one, those that most requests wait for first.
        """
        self._waited_ns = {name: at_ns for name, at_ns in self._waited_ns.items() if now_ns - at_ns < PLACE_NS}
        free = MOST_UNSERVED_NAMES - len(self._waited_ns.keys() - {"", OTHER_MODELS})
        told: Counter[str] = Counter()
        new: list[str] = []
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            place = name if name in self._waited_ns or not name or free > 0 else OTHER_MODELS
            if place not in self._waited_ns:
                new.append(place)
                if place not in ("", OTHER_MODELS):
                    free -= 1
            self._waited_ns[place] = now_ns
            told[place] += count
        return dict(told), new


def unserved(lines: Iterable[Line], fleet: Fleet) -> dict[str, int]:
    """Return how many requests in `lines` wait for each model that no worker serves; "" is any model."""
    counts: Counter[str] = Counter()
    for line in lines:
        if not fleet.serving(line.model):
            counts[line.model] += len(line)
    return dict(counts)
