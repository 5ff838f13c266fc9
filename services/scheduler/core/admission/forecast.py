"""What the requests of one worker will need, step by step from now.

Every running completion grows by a token a step until it ends. For some steps
ahead, finer near than far, the forecast sums what each request is expected to
hold then, its size weighted with the chance that it still runs, and the variance
of that sum, for requests end independently of each other. A new request fits if at
none of these steps the sum, with it and with a margin of so many standard
deviations, exceeds the capacity: completions to come are spent before they
happen, growth to come is kept free, and the more requests share the cache, the
less they surprise together. What they hold if none ends is never exceeded.

Reservations stay close to what the engine really holds (they grow block by block),
so the ledger says what is taken now and the forecast what will be taken.
Sums are whole numbers, so that adding and removing a request leaves no rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

from services.scheduler.core.admission.estimate import need_blocks, sequence_blocks
from services.scheduler.core.admission.lengths import Curve
from services.scheduler.core.messages import EngineShape

UNIT: Final = 1024
"""Sums count in 1/1024 of a block, and variances in 1/1024 of a block squared."""

FIRST_HORIZON_BLOCKS: Final = 0.25
"""The first look ahead, in blocks' worth of tokens: nearer than that hardly anything grows or ends."""

HORIZON_FACTOR: Final = 2
"""Each look is this much farther than the one before. Looks half as far apart cost twice as much, and admit no
better (kv-bound, near-critical, bimodal and mooncake in `benchmarks.admission.sim`)."""

LEAST_CHANCE: Final = 1 / 512
"""Requests less likely than this to still run are taken as ended."""


def horizons_of(shape: EngineShape) -> tuple[int, ...]:
    """Return the steps ahead that are looked at, up to the whole window."""
    found: list[int] = []
    steps = max(shape.block_size * FIRST_HORIZON_BLOCKS, 1.0)
    while steps < shape.max_model_len:
        if not found or int(steps) > found[-1]:
            found.append(int(steps))
        steps *= HORIZON_FACTOR
    return (*found, shape.max_model_len)


class Look:
    """One look ahead: by how many blocks a completion has grown then, the variance of that, and the most.

    Where within its last block a request stands is not known: of the border crossings to come the last has happened
    with the chance of the rest.
    """

    __slots__ = ("growth", "most_growth", "unsure")

    def __init__(self, steps: int, block_size: int) -> None:
        """Look that many steps ahead."""
        self.growth = steps / block_size
        rest = self.growth % 1
        self.unsure = rest * (1 - rest)
        self.most_growth = need_blocks(steps, block_size)


class Size:
    """What of a request decides its demand. Tokens are of one completion, blocks of all `completions`."""

    __slots__ = ("completions", "generated", "held_blocks", "limit", "prompt_tokens")

    def __init__(self, held_blocks: int, prompt_tokens: int, generated: int, limit: int, completions: int = 1) -> None:
        """Take what is known of a request that holds blocks and has generated so many tokens of its limit."""
        self.held_blocks = held_blocks
        self.prompt_tokens = prompt_tokens
        self.generated = generated
        self.limit = limit
        self.completions = completions


class Demand:
    """What one request is expected to hold at each horizon, the variance of that, and the most; 0 beyond the last.

    `peak` is the highest of the means.
    """

    __slots__ = ("means", "mosts", "peak", "variances")

    def __init__(self, means: list[int], variances: list[int], mosts: list[int], peak: int) -> None:
        """Take lists of the same length, which nobody changes afterwards."""
        self.means = means
        self.variances = variances
        self.mosts = mosts
        self.peak = peak


NO_DEMAND = Demand([], [], [], 0)


class Forecast:
    """Summed demand of the requests on one worker. One owner, who remembers what it added."""

    def __init__(self, shape: EngineShape) -> None:
        """Start with no request on an engine of this shape."""
        self._shape = shape
        self._horizons = horizons_of(shape)
        self._first = 0
        """The nearest look that a request granted now is there for."""
        self._looks = [Look(steps, shape.block_size) for steps in self._horizons]
        self._means = [0] * len(self._horizons)
        self._variances = [0] * len(self._horizons)
        self._mosts = [0] * len(self._horizons)
        self._shared = 0
        self._shared_parts = [0.0] * len(self._horizons)
        self._own_part = 1.0
        """What of that which requests hold nobody else does."""

    def share(self, shared_blocks: int, held_blocks: int, sequences: int) -> None:
        """Count once what `sequences` that hold so many blocks hold together, `shared_blocks` less in all.

        Those that are left at a look are taken to share as much as all do now of what they hold now, and nothing of
        what they have gained by then, as each gains alike and holds the mean.
        """
        self._shared = shared_blocks * UNIT if held_blocks else 0
        if not self._shared:
            self._own_part = 1.0
            return
        part = min(shared_blocks / held_blocks, 1.0)
        each = held_blocks / max(sequences, 1)
        self._shared_parts = [part * each / (each + look.growth) for look in self._looks]
        self._own_part = 1 - part

    def demand(self, size: Size, curve: Curve) -> Demand:
        """Return what a request of this size will need if `curve` tells how long outputs are."""
        shape = self._shape
        total = min(size.prompt_tokens + size.limit, shape.max_model_len)
        most = max(size.completions * sequence_blocks(total, shape), size.held_blocks)
        held, completions = size.held_blocks, size.completions
        means: list[int] = []
        variances: list[int] = []
        mosts: list[int] = []
        peak = 0
        looks, chances = self._ahead(size, curve)
        for index, look in enumerate(looks):
            chance = chances[index]
            if chance < LEAST_CHANCE:
                break
            blocks = min(held + completions * look.growth, most)
            ending = (1 - chance) * blocks * blocks / completions
            mean = int(chance * blocks * UNIT)
            peak = max(peak, mean)
            means.append(mean)
            variances.append(int(chance * (ending + completions * look.unsure) * UNIT))
            mosts.append(min(held + completions * look.most_growth, most) * UNIT)
        return Demand(means, variances, mosts, peak)

    def _ahead(self, size: Size, curve: Curve) -> tuple[list[Look], list[float]]:
        """Return the looks ahead for a request, and for each the chance that it still runs then.

        One that runs to its limit is largest just before it: the last look is there rather than beyond.
        """
        last = size.limit - size.generated - 1
        # Tokens since the last ACK are not known anyway: whole blocks are near enough, and few.
        age = size.generated - size.generated % self._shape.block_size
        before = bisect_left(self._horizons, last)
        looks = self._looks[:before]
        chances = list(curve.stays(age, self._horizons)[:before])
        if last > 0 and before < len(self._horizons):
            looks.append(Look(last, self._shape.block_size))
            chances.append(curve.staying(size.generated, last))
        return looks, chances

    def add(self, demand: Demand) -> None:
        """Count a request in."""
        for index, mean in enumerate(demand.means):
            self._means[index] += mean
            self._variances[index] += demand.variances[index]
            self._mosts[index] += demand.mosts[index]

    def remove(self, demand: Demand) -> None:
        """Count a request out, by the very demand that was added."""
        for index, mean in enumerate(demand.means):
            self._means[index] -= mean
            self._variances[index] -= demand.variances[index]
            self._mosts[index] -= demand.mosts[index]

    def look_from(self, steps: float) -> None:
        """Leave out the looks nearer than so many steps, all but the farthest: what is granted now is not there yet.

        What ends until then makes room for it. That what is booked by then exists is the ledger's to see to.
        """
        self._first = min(bisect_left(self._horizons, steps), len(self._horizons) - 1)

    def spare_blocks(self, extra: Demand, deviations: float) -> int:
        """Return the blocks left at the fullest step ahead, with `extra` and the margin; negative if there are none."""
        peak = 0.0
        margin = self._scale(deviations)
        added = len(extra.means)
        for index in range(self._first, len(self._means)):
            mean, variance, highest = self._means[index], self._variances[index], self._mosts[index]
            if self._shared:
                once = self._once(index)
                mean -= once
                highest -= once
            if index < added:
                mean += extra.means[index]
                variance += extra.variances[index]
                highest += extra.mosts[index]
            # A look at which even all of them fit below the peak cannot raise it.
            if highest > peak:
                likely = mean + margin * math.sqrt(float(variance))
                if likely > peak:
                    peak = likely if likely < highest else highest
        return math.floor(self._shape.capacity_blocks - peak / UNIT)

    def peak_blocks(self, deviations: float) -> int:
        """Return the predicted demand at the fullest step ahead, margin included."""
        return self._shape.capacity_blocks - self.spare_blocks(NO_DEMAND, deviations)

    def deviation_share(self, deviations: float) -> float:
        """Return one standard deviation of the demand at the fullest step ahead, as a share of the capacity."""
        margin = self._scale(deviations)
        peak = -math.inf
        fullest = 0
        for index in range(self._first, len(self._means)):
            mean, variance = self._means[index], self._variances[index]
            if self._shared:
                mean -= self._once(index)
            likely = mean + margin * math.sqrt(float(variance))
            if likely > peak:
                peak, fullest = likely, variance
        return self._scale(math.sqrt(fullest)) / UNIT / self._shape.capacity_blocks

    def _scale(self, deviations: float) -> float:
        """Return so many deviations for the root of a variance, in the unit of sums: who ends frees only its own."""
        return deviations * self._own_part * math.sqrt(UNIT)

    def _once(self, index: int) -> int:
        """Return what the requests that are left at a look hold together, for each of them but the first."""
        return min(self._shared, int(self._shared_parts[index] * self._means[index]))
