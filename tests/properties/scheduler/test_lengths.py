"""What is learned of output lengths: never more than was seen, and close to the truth when enough was."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission import lengths
from services.scheduler.core.admission.lengths import (
    EDGES,
    FADE,
    MOST_BINS,
    MOST_WEIGHT,
    Kind,
    Lengths,
    bin_of,
    prompt_class,
)

KIND = Kind("m", "batch", 4)
LENGTHS = st.integers(1, 100_000)


def end(known: Lengths, kind: Kind, tokens: int) -> None:
    """One completion that ended by itself."""
    known.reached(kind, 0, bin_of(tokens))
    known.ended(kind, tokens)


def cut(known: Lengths, kind: Kind, tokens: int) -> None:
    """One completion that was cut after `tokens`."""
    known.reached(kind, 0, bin_of(tokens) - 1)
    known.cut()


@given(tokens=st.integers(0, EDGES[MOST_BINS] - 1))
def test_a_length_lies_in_its_bin(tokens: int) -> None:
    index = bin_of(tokens)
    assert EDGES[index] <= tokens < EDGES[index + 1]


@given(tokens=st.integers(8, EDGES[MOST_BINS] - 1))
def test_a_bin_is_a_quarter_of_its_lengths_at_most(tokens: int) -> None:
    index = bin_of(tokens)
    assert EDGES[index + 1] - EDGES[index] <= EDGES[index] / 4


@given(seen=st.lists(st.tuples(LENGTHS, st.booleans())), generated=LENGTHS, steps=st.lists(st.integers(0, 10_000)))
def test_the_chance_to_still_run_is_a_chance_and_never_rises(
    seen: list[tuple[int, bool]], generated: int, steps: list[int]
) -> None:
    known = Lengths()
    for tokens, ended in seen:
        (end if ended else cut)(known, KIND, tokens)
    chances = [known.curve(KIND).staying(generated, more) for more in sorted(steps)]
    assert all(0 <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)


@given(seen=st.lists(LENGTHS), generated=LENGTHS, more=LENGTHS)
def test_what_was_only_cut_makes_nothing_look_shorter(seen: list[int], generated: int, more: int) -> None:
    known = Lengths()
    for tokens in seen:
        cut(known, KIND, tokens)
    assert known.curve(KIND).staying(generated, more) >= Lengths().curve(KIND).staying(generated, more) - 1e-9


def test_at_first_every_length_is_guessed_to_double_with_the_same_chance() -> None:
    guess = Lengths().curve(KIND)
    assert guess.reaching(64) == 1
    for tokens in (64, 256, 1024, 16_384):
        assert guess.reaching(2 * tokens) / guess.reaching(tokens) == pytest.approx(2**-0.5)


def test_those_that_run_correct_the_guess_before_the_first_has_ended() -> None:
    known = Lengths()
    known.reached(KIND, 0, bin_of(1000))
    before = known.curve(KIND).reaching(1000)
    for _ in range(50):
        known.reached(KIND, 0, bin_of(1000))
    assert before < known.curve(KIND).reaching(1000)
    assert known.curve(KIND).reaching(1000) > 0.9
    assert known.curve(KIND).reaching(2000) / known.curve(KIND).reaching(1000) < 0.8, "beyond, nothing is known"


def test_it_finds_the_distribution() -> None:
    rng = random.Random(4)
    known = Lengths()
    drawn = [max(round(rng.lognormvariate(5, 0.7)), 1) for _ in range(4000)]
    for tokens in drawn:
        end(known, KIND, tokens)
    curve = known.curve(KIND)
    for at in (20, 80, 150, 300, 600):
        truth = sum(tokens >= at for tokens in drawn) / len(drawn)
        assert curve.reaching(at) == pytest.approx(truth, abs=0.03)


def test_cut_outputs_do_not_make_outputs_look_short() -> None:
    """Half of the requests ask for 64 tokens at most; what the others show is true of all."""
    rng = random.Random(5)
    known = Lengths()
    for number in range(6000):
        tokens = max(round(rng.expovariate(1 / 200)), 1)
        if number % 2 and tokens >= 64:
            cut(known, KIND, 64)
        else:
            end(known, KIND, tokens)
    assert known.curve(KIND).reaching(200) == pytest.approx(0.37, abs=0.04)


def test_those_that_still_run_count_before_they_end() -> None:
    """Short outputs end first: without the others, the first hundred ends would look like all there is."""
    known = Lengths()
    for _ in range(100):
        end(known, KIND, 10)
        known.reached(KIND, 0, bin_of(300))
    assert known.curve(KIND).reaching(300) == pytest.approx(0.5, abs=0.05)


def test_those_that_may_have_come_as_far_count_where_others_end() -> None:
    """A hundred run, five end at 20; the others are not heard of before token 32, and may be as far."""
    known = Lengths()
    known.exposed(KIND, 0, bin_of(32), 95)
    for _ in range(5):
        end(known, KIND, 20)
    assert known.curve(KIND).reaching(32) == pytest.approx(0.95, abs=0.02)
    known.exposed(KIND, 0, bin_of(32), -95)
    end(known, KIND, 20)
    assert known.curve(KIND).reaching(32) < 0.5


@given(changes=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 79), st.integers(0, 3))))
def test_what_was_exposed_and_taken_out_leaves_nothing_behind(changes: list[tuple[int, int, int]]) -> None:
    known, plain = Lengths(), Lengths()
    for first, last, count in changes:
        known.exposed(KIND, first, last, count)
    for first, last, count in changes:
        known.exposed(KIND, first, last, -count)
    for lengths_ in (known, plain):
        end(lengths_, KIND, 40)
    assert [known.curve(KIND).reaching(at) for at in range(100)] == [
        plain.curve(KIND).reaching(at) for at in range(100)
    ]


def test_old_lengths_fade() -> None:
    known = Lengths()
    for tokens, count in ((1000, 2000), (50, 8000)):
        for _ in range(count):
            end(known, KIND, tokens)
    assert known.curve(KIND).reaching(900) < 0.1


def test_cut_lengths_fade_however_many_there_were() -> None:
    known = Lengths()
    for _ in range(50_000):
        cut(known, KIND, 2_048)
    for _ in range(8_000):
        end(known, KIND, 100)
    assert known.curve(KIND).reaching(512) < 0.1


@pytest.mark.parametrize("cuts", [0, 1])
def test_weights_never_outgrow_their_numbers(cuts: int) -> None:
    known = Lengths()
    for _ in range(int(math.log(MOST_WEIGHT, FADE)) // (2 + cuts) + 1):
        end(known, KIND, 10)
        end(known, KIND, 1000)
        for _ in range(cuts):
            cut(known, KIND, 10)
    assert known._weight <= 2.0
    assert known.curve(KIND).reaching(500) == pytest.approx(0.5, abs=0.05)


def test_a_new_kind_leans_on_its_channel_and_its_model_until_it_knows_better() -> None:
    known = Lengths()
    for _ in range(200):
        end(known, Kind("m", "batch", 4), 100)
    longer = Kind("m", "batch", 6)
    other_channel = Kind("m", "interactive", 4)
    assert known.curve(longer).reaching(200) < 0.1
    assert known.curve(other_channel).reaching(200) < 0.1
    assert known.curve(Kind("other", "batch", 4)).reaching(200) == Lengths().curve(KIND).reaching(200)
    for _ in range(200):
        end(known, longer, 1000)
    assert known.curve(longer).reaching(500) > 0.8
    assert known.curve(Kind("m", "batch", 4)).reaching(500) < 0.1


def test_a_curve_is_drawn_again_when_enough_has_ended() -> None:
    known = Lengths()
    for _ in range(400):
        end(known, KIND, 100)
    first = known.curve(KIND)
    end(known, KIND, 100)
    assert known.curve(KIND) is first
    for _ in range(100):
        end(known, KIND, 100)
    assert known.curve(KIND) is not first


def test_kinds_that_come_and_go_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_TABLES", 10)
    known = Lengths()
    for number in range(100):
        kind = Kind("m", f"channel {number}", 4)
        end(known, kind, 10)
        known.curve(kind)
    assert len(known._tables) <= 10
    assert len(known._curves) <= 10


def test_prompt_classes_are_coarse() -> None:
    assert prompt_class(20) == prompt_class(31) != prompt_class(64)
    assert len({prompt_class(tokens) for tokens in range(1, 100_000)}) < 10


@given(short=st.integers(1, 200), before=st.integers(1, 300), looks=st.booleans())
def test_what_is_only_cut_from_some_time_on_is_learned_as_well(short: int, before: int, looks: bool) -> None:
    """Outputs ended early; from then on all run to a limit, and none ends by itself."""
    known = Lengths()
    for _ in range(before):
        end(known, KIND, short)
        if looks:
            known.curve(KIND)
    assert known.curve(KIND).staying(0, 2 * short) < 0.9
    for _ in range(40 * before + 2 * lengths.MOST_REFRESH_NOTES):
        cut(known, KIND, 2_000)
    assert known.curve(KIND).staying(0, 2 * short) > 0.9
