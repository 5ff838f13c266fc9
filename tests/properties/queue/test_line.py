"""The waiting line against a plain one that looks at everything: windows, the bound beside them, and age."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.queue.core import lines
from services.queue.core.lines import Line
from tests.support.effort import examples

MODELS = ("", "a", "b", "c")
MOST_WINDOWS, MOST_BEYOND = 1, 1

MODEL = st.sampled_from(MODELS)
ENTER = st.tuples(st.just("enter"), MODEL, st.integers(-1, 1))
ANNOUNCE = st.tuples(st.just("announce"))
DEED = st.one_of(
    ENTER,
    ENTER,
    ENTER,
    st.tuples(st.just("leave"), st.integers(0, 50)),
    st.tuples(st.just("return"), st.integers(0, 50)),
    st.tuples(st.just("window"), st.integers(0, 3), st.lists(MODEL, unique=True, max_size=2)),
    ANNOUNCE,
    ANNOUNCE,
    ANNOUNCE,
    st.sampled_from([("announce",)] * 9 + [("forget",)]),
)
"""Requests enter often, and a scheduler comes anew seldom: between there is time for the bound to be reached."""


class Plain:
    """What waits, what is announced and what the scheduler said."""

    def __init__(self) -> None:
        self.line = Line()
        self.waiting: dict[int, tuple[int, str]] = {}
        self.left: dict[int, tuple[int, str]] = {}
        self.announced: set[int] = set()
        self.served: set[str] = set()
        self.limit = 0

    def do(self, deed: tuple[object, ...]) -> None:
        """Do one deed to the line and note it here."""
        match deed:
            case "enter", str(model), int(priority):
                self.enter(len(self.waiting) + len(self.left) + 1, priority, model)
            case "leave", int(index) if self.waiting:
                seq = sorted(self.waiting)[index % len(self.waiting)]
                assert self.line.leave(seq, self.waiting[seq][1]) == (seq in self.announced)
                self.left[seq] = self.waiting.pop(seq)
                self.announced.discard(seq)
            case "return", int(index) if self.left:
                seq = sorted(self.left)[index % len(self.left)]
                self.enter(seq, *self.left.pop(seq))
            case "window", int(limit), list(models):
                self.limit, self.served = limit, set(models)
                self.line.set_served(models)
                self.line.set_limit(limit)
            case ("announce",):
                self.announce()
            case ("forget",):
                self.line.forget_announcements()
                self.announced.clear()
                self.limit, self.served = 0, set()

    def enter(self, seq: int, priority: int, model: str) -> None:
        """Let a request wait."""
        self.waiting[seq] = (priority, model)
        self.line.enter(seq, priority, model)

    def announce(self) -> None:
        """Have announced what may be, and check that nothing else is, nor too little."""
        before = self.counted()
        for seq in self.line.announce():
            _, model = self.waiting[seq]
            others = [other for other in self.waiting if self.waiting[other][1] == model]
            unknown = [other for other in others if other not in self.announced]
            assert seq == min(unknown, key=lambda other: (self.waiting[other][0], other))
            self.announced.add(seq)
        counts = self.counted()
        most = MOST_WINDOWS * self.limit + MOST_BEYOND
        bounded = sum(counts[model] for model in MODELS if model not in self.served)
        assert bounded <= max(most, sum(before[model] for model in MODELS if model not in self.served))
        for model in MODELS:
            waiting = sum(asked == model for _, asked in self.waiting.values())
            assert counts[model] <= max(before[model], self.limit)
            if model in self.served or bounded < most:
                assert counts[model] >= min(waiting, self.limit)
        assert (self.line.announced, self.line.bounded) == (counts.total(), bounded)

    def servable(self) -> list[int]:
        """Return who waits for a model that is served; everybody while nobody says what is."""
        return [seq for seq, (_, model) in self.waiting.items() if model in self.served or not self.served]

    def counted(self) -> Counter[str]:
        """Return how many are announced for each model."""
        return Counter(self.waiting[seq][1] for seq in self.announced)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(DEED, min_size=30, max_size=40))
def test_a_line_announces_what_it_may_and_knows_its_oldest(deeds: list[tuple[object, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "MOST_WINDOWS", MOST_WINDOWS)
        patch.setattr(lines, "MOST_BEYOND", MOST_BEYOND)
        plain = Plain()
        for deed in [*deeds, ("announce",)]:
            plain.do(deed)
            assert plain.line.oldest() == min(plain.waiting, default=None)
            assert plain.line.oldest_servable() == min(plain.servable(), default=None)
            assert len(plain.line) == len(plain.waiting)
