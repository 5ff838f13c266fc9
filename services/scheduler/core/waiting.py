"""How many blocks the requests in line are expected to need: the demand side of credit starvation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.core.admission import Policy
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.line import Line

SAMPLE_REQUESTS = 16
"""Requests of a line that are asked for their need; the others are taken to be like them. It is done five times a
second for each line, and a policy's forecast takes some ten microseconds a request."""


def waiting_blocks(lines: Iterable[Line], fleet: Fleet, policy: Policy) -> dict[tuple[str, str], int]:
    """Return the blocks that the requests in `lines` are expected to need, by channel and model asked for.

    Requests for a model that nobody serves have no size yet: they count in `Machine.unserved`.
    """
    needed: Counter[tuple[str, str]] = Counter()
    for line in lines:
        groups = fleet.serving(line.model)
        if not groups:
            continue
        worker = next(iter(groups[0].workers.values()))
        sample = line.sample(SAMPLE_REQUESTS)
        sampled: Counter[str] = Counter()
        for request in (entry.announced for entry in sample):
            sampled[request.channel] += policy.expected_blocks(request, worker)
        for channel, blocks in sampled.items():
            needed[channel, line.model] += -(-blocks * len(line) // len(sample))
    return dict(needed)
