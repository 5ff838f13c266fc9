"""How long outputs are: learned from what has ended, and from what has not ended yet.

A life table keeps, for bins of output length four to an octave, how many
completions reached a bin and how many ended in it by themselves. A completion that
still runs, or that its limit cut short, has reached its bins and ended in none,
so it counts for what is known of it: taking only ended ones would make outputs
look short, because short ones end first. For the same reason one that runs counts
in every bin it may end in before it is heard of again: its end would be heard at
once, its going on only then.

Requests are told apart by model, channel and coarse prompt length. A finer table
leans on the coarser one above it with the weight of a few observations, so it
says the same until it knows better; the coarsest leans on a guess without a scale:
however long an output is already, it doubles with the same chance (a Pareto tail).

Old observations fade: each completion that leaves weighs a little more than the one before, ended or cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from services.scheduler.core.admission.estimate import output_tokens
from services.scheduler.core.messages import Announced, EngineShape

MOST_BINS: Final = 80
"""Bins of a table: the last one begins at 1.8 million tokens, beyond any window."""

PRIOR_WEIGHT: Final = 8.0
"""Observations that the coarser table counts for in a bin of a finer one: one request says little, dozens say much."""

FIRST_PRIOR_WEIGHT: Final = 2.0
"""Observations that the first guess counts for in a bin of the coarsest table: it is soon outweighed where much has
been seen, and keeps the lengths beyond all that was seen possible."""

FIRST_SHAPE: Final = 0.5
"""Shape of the first guess: of outputs as long as x, one in 2^shape becomes twice as long, 71 in 100. Between 1, under
which hardly any comes near a large window, and 0, under which all that goes on runs to it. With 0 a pool of a few
windows is half empty until dozens have ended; with 1 the first outputs that are long after all preempt each other."""

FIRST_SCALE_TOKENS: Final = 64
"""Outputs shorter than this are not expected to end until some have: a short answer."""

FADE: Final = 2.0 ** (1 / 2048)
"""Growth of an observation's weight from one completion that leaves to the next: after 2,048 an old one counts half."""

MOST_WEIGHT: Final = 1e9
"""Weights are scaled back to 1 when they reach this, long before a double loses digits."""

MOST_TABLES = 4096
"""Tables kept, so that channels and model names that come and go cannot fill memory; the oldest goes first."""

REFRESH_SHARE: Final = 16
"""A curve is drawn again when what was noted has grown by one part in this many: an estimate does not change faster."""

MOST_REFRESH_NOTES: Final = 64
"""Notes after which a curve is drawn again at the latest."""


def bin_of(tokens: int) -> int:
    """Return the bin of a length: exact below 8 tokens, then four to an octave."""
    shift = max(tokens.bit_length() - 3, 0)
    return min((shift << 2) + (tokens >> shift), MOST_BINS - 1)


def edge_of(index: int) -> int:
    """Return the least length of a bin."""
    return index if index < 8 else (4 + (index & 3)) << ((index >> 2) - 1)


EDGES: Final = tuple(edge_of(index) for index in range(MOST_BINS + 1))


class Kind:
    """What requests are told apart by; `prompt_class` grows by one with every fourfold prompt."""

    __slots__ = ("_hash", "channel", "model", "prompt_class")

    def __init__(self, model: str, channel: str, prompt_class: int) -> None:
        """Make the kind; it is looked up by all its life, so its hash is found once."""
        self.model = model
        self.channel = channel
        self.prompt_class = prompt_class
        self._hash = hash((model, channel, prompt_class))

    def __eq__(self, other: object) -> bool:
        """Compare what is told apart."""
        return (
            isinstance(other, Kind)
            and self.prompt_class == other.prompt_class
            and self.channel == other.channel
            and self.model == other.model
        )

    def __hash__(self) -> int:
        """Return the hash of what is told apart."""
        return self._hash

    def coarser(self) -> tuple[Key, ...]:
        """Return the keys of the tables from the coarsest to the one of this kind."""
        return (self.model,), (self.model, self.channel), self


Key = tuple[str] | tuple[str, str] | Kind


def prompt_class(prompt_tokens: int) -> int:
    """Return the coarse class of a prompt's length."""
    return prompt_tokens.bit_length() >> 1


class Curve:
    """The share of completions that reach a length, from 1 at no tokens at all, never rising."""

    def __init__(self, reaching: Sequence[float]) -> None:
        """Take the shares that reach each bin's edge, the end of the last bin included."""
        self._reaching = reaching
        self._stays: dict[tuple[int, tuple[int, ...]], tuple[float, ...]] = {}

    def reaching(self, tokens: int) -> float:
        """Return the share whose length is at least `tokens`."""
        index = bin_of(tokens)
        low, high = self._reaching[index], self._reaching[index + 1]
        return low + (high - low) * min((tokens - EDGES[index]) / (EDGES[index + 1] - EDGES[index]), 1.0)

    def staying(self, generated: int, more: int) -> float:
        """Return the chance that one which runs after `generated` tokens still runs after `more` of them."""
        now = self.reaching(generated + 1)
        return self.reaching(generated + more + 1) / now if now > 0 else 1.0

    def stays(self, generated: int, horizons: tuple[int, ...]) -> tuple[float, ...]:
        """Return `staying` for each of `horizons`; remembered, for requests come through the same lengths."""
        found = self._stays.get((generated, horizons))
        if found is None:
            found = tuple(self.staying(generated, horizon) for horizon in horizons)
            self._stays[generated, horizons] = found
        return found


FIRST_HAZARDS = tuple(
    1 - (low / high) ** FIRST_SHAPE if low >= FIRST_SCALE_TOKENS else 0.0 for low, high in pairwise(EDGES)
)
"""Chance to end in a bin once it is reached, as far as anybody knows before the first request."""


class LifeTable:
    """Weights of the completions that reached each bin, and of those that ended in it.

    `exposed` counts those that run and may be in the bin by now.
    """

    __slots__ = ("ended", "exposed", "reached")

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.reached = [0.0] * MOST_BINS
        self.ended = [0.0] * MOST_BINS
        self.exposed = [0] * MOST_BINS

    def scale(self, factor: float) -> None:
        """Multiply every weight."""
        self.reached = [weight * factor for weight in self.reached]
        self.ended = [weight * factor for weight in self.ended]


class Lengths:
    """Life tables by kind, and the curves drawn from them."""

    def __init__(self) -> None:
        """Start with nothing seen: every curve is the first guess."""
        self._tables: dict[Key, LifeTable] = {}
        self._chains: dict[Kind, list[LifeTable]] = {}
        """The tables of a kind from the coarsest to its own, as long as none of any kind has been given up."""
        self._curves: dict[Kind, tuple[int, int, Curve]] = {}
        """Each with the notes and the cuts at which it is out of date."""
        self._weight = 1.0
        self._ends = 0
        self._notes = 0
        """What tells whether curves are out of date: ends, and until the first of them what was reached."""
        self._cuts = 0
        """So do these, where hardly any completion ends by itself."""

    def reached(self, kind: Kind, first_bin: int, last_bin: int) -> None:
        """Note that a completion has reached the bins from `first_bin` to `last_bin`."""
        if first_bin > last_bin:
            return
        if not self._ends:
            self._notes += 1
        for table in self._chain(kind):
            reached = table.reached
            for index in range(first_bin, last_bin + 1):
                reached[index] += self._weight

    def exposed(self, kind: Kind, first_bin: int, last_bin: int, change: int) -> None:
        """Note that `change` more (or fewer) completions run that may end in the bins from `first_bin` to `last_bin`.

        A table that was given up meanwhile has forgotten those it is told to take out.
        """
        if first_bin > last_bin:
            return
        for table in self._chain(kind):
            exposed = table.exposed
            for index in range(first_bin, last_bin + 1):
                count = exposed[index] + change
                # Not max(), which takes thrice as long: this runs for every bin of every request.
                exposed[index] = count if count > 0 else 0

    def ended(self, kind: Kind, tokens: int) -> None:
        """Note that a completion ended by itself after `tokens`; its bins have been noted as reached."""
        for table in self._chain(kind):
            table.ended[bin_of(tokens)] += self._weight
        if not self._ends:
            self._notes = 0
            self._curves.clear()
        self._ends += 1
        self._notes += 1
        self._fade()

    def cut(self) -> None:
        """Note that a completion has gone that did not end by itself; its bins have been noted as reached."""
        self._cuts += 1
        self._fade()

    def _fade(self) -> None:
        """Let what was noted weigh less than what comes: all that leaves is noted, so all of it makes the old older."""
        self._weight *= FADE
        if self._weight > MOST_WEIGHT:
            for table in self._tables.values():
                table.scale(1 / self._weight)
            self._weight = 1.0

    def curve(self, kind: Kind) -> Curve:
        """Return what is expected of a kind now; drawn again only when enough has happened since the last time."""
        drawn = self._curves.get(kind)
        if drawn is not None and self._notes < drawn[0] and self._cuts < drawn[1]:
            return drawn[2]
        curve = self._draw(kind)
        if len(self._curves) >= MOST_TABLES:
            self._curves.clear()
        notes = self._notes + 1 + min(self._notes // REFRESH_SHARE, MOST_REFRESH_NOTES)
        self._curves[kind] = notes, self._cuts + MOST_REFRESH_NOTES, curve
        return curve

    def _draw(self, kind: Kind) -> Curve:
        hazards: Sequence[float] = FIRST_HAZARDS
        weight = FIRST_PRIOR_WEIGHT
        for key in kind.coarser():
            table = self._tables.get(key)
            if table is None:
                break
            prior, weight = weight * self._weight, PRIOR_WEIGHT
            reached, exposed, ended = table.reached, table.exposed, table.ended
            hazards = [
                min((ended[index] + prior * above) / (reached[index] + exposed[index] * self._weight + prior), 1.0)
                for index, above in enumerate(hazards)
            ]
        share = 1.0
        reaching = [share]
        for hazard in hazards:
            share *= 1.0 - hazard
            reaching.append(share)
        return Curve(reaching)

    def _chain(self, kind: Kind) -> list[LifeTable]:
        """Return the tables of a kind from the coarsest to its own, made if need be."""
        chain = self._chains.get(kind)
        if chain is None:
            # Kept before it is whole: if making a table gives another up, it is forgotten with the rest.
            chain = self._chains[kind] = []
            for key in kind.coarser():
                chain.append(self._table(key))
        return chain

    def _table(self, key: Key) -> LifeTable:
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]
                self._chains.clear()
            table = self._tables[key] = LifeTable()
        return table


def limit_tokens(request: Announced, shape: EngineShape, prompt_tokens: int) -> int:
    """Return the most output tokens of one completion after a prompt of `prompt_tokens`; at least 1."""
    return min(output_tokens(request, shape), max(shape.max_model_len - prompt_tokens, 1))
