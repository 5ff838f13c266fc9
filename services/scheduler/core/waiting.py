"""What the requests in line wait for: blocks, the demand side of credit starvation, or a model that nobody serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.sharing.line import Line

SAMPLE_REQUESTS = 16
"""Requests of a line that are asked for their need; the others are taken to be like them. It is done five times a
second for each line, and a policy's forecast takes some ten microseconds a request."""


MOST_UNSERVED_NAMES = 100
"""Models nobody serves that are told apart; whoever makes names up shall not fill metrics and logs with them."""

OTHER_MODELS = "(others)"
"""What the rest of them is counted under."""


def waiting_blocks(lines: Iterable[Line], fleet: Fleet, policy: Policy) -> dict[tuple[str, str], int]:
    """Return the blocks that the requests in `lines` are expected to need, by channel and model asked for.

    Requests for a model that nobody serves have no size yet: they count in `unserved`.
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


def unserved(lines: Iterable[Line], fleet: Fleet) -> dict[str, int]:
    """Return how many requests in `lines` wait for each model that no worker serves; "" is any model.

    Beyond MOST_UNSERVED_NAMES the ones with fewest are counted together under OTHER_MODELS.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        if not fleet.serving(line.model):
            counts[line.model] += len(line)
    if len(counts) <= MOST_UNSERVED_NAMES:
        return dict(counts)
    most = dict(counts.most_common(MOST_UNSERVED_NAMES))
    return most | {OTHER_MODELS: sum(counts.values()) - sum(most.values())}
