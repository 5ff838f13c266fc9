"""Requests that name no `max_tokens`, the usual call of a chat client, are booked at what their prompts may need."""

from __future__ import annotations

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.admission.predictive import AHEAD_SHARE
from services.scheduler.core.admission.prompts import FIRST_TEMPLATE_TOKENS, FIRST_TOKENS_PER_BYTE, LEAST_PROMPTS
from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig

BLOCK_TOKENS, WINDOW_TOKENS, CAPACITY_BLOCKS = 16, 8192, 2000
CHAT = {"prompt_tokens": 0, "prompt_bytes": 16_000, "max_tokens": 0, "chat": True}
PROMPT_TOKENS, PROMPT_BLOCKS = 4000, 251


def rig_with_one_worker() -> Rig:
    rig = Rig({"chat": Share()}, "predictive")
    rig.open("w", m.EngineShape(CAPACITY_BLOCKS, BLOCK_TOKENS, WINDOW_TOKENS, 256))
    return rig


def tell_the_prompt(rig: Rig, grant: m.Grant, seq: int, tokens: int = PROMPT_TOKENS) -> None:
    """Have a grant claimed and its prompt tokenized."""
    held_blocks = -(-(tokens + 2) // BLOCK_TOKENS)
    rig.tell(
        m.Gone(grant.request_id, m.GoneReason.CLAIMED),
        m.TokenizerAck(grant.epoch, grant.epoch, grant.request_id, seq, held_blocks, prompt_tokens=tokens),
    )


def answer(rig: Rig, grant: m.Grant, seq: int) -> None:
    """Have a request answered with 200 tokens."""
    cause = m.ReleaseCause.COMPLETED
    rig.tell(m.CompletionAck(grant.epoch, grant.epoch, grant.request_id, seq, cause, output_tokens=200))


def run_one(rig: Rig, number: int) -> None:
    """Have one chat granted, tokenized, and answered."""
    rig.announce("chat", 0, **CHAT)
    grant = rig.grants[-1]
    tell_the_prompt(rig, grant, 2 * number)
    answer(rig, grant, 2 * number + 1)


@pytest.mark.parametrize("prompt", [CHAT, {**CHAT, "chat": False}], ids=["chat", "text"])
def test_before_anything_is_known_a_prompt_may_fill_the_window(prompt: dict[str, object]) -> None:
    rig = rig_with_one_worker()
    rig.announce("chat", *[0] * 20, **prompt)
    assert {grant.booked_blocks for grant in rig.grants} == {WINDOW_TOKENS // BLOCK_TOKENS}
    assert sum(grant.booked_blocks for grant in rig.grants) <= CAPACITY_BLOCKS * (1 + AHEAD_SHARE)


def test_prompts_are_booked_by_what_was_learned_and_not_beyond_the_pool() -> None:
    rig = rig_with_one_worker()
    for number in range(40):
        run_one(rig, number + 1)
    known = len(rig.grants)
    rig.announce("chat", *[0] * 200, **CHAT)
    booked = [grant.booked_blocks for grant in rig.grants[known:]]
    assert set(booked) == {PROMPT_BLOCKS}
    assert sum(booked) <= CAPACITY_BLOCKS
    assert rig.worker("w").ledger.overcommitted_blocks == 0


def test_a_short_prompt_is_not_taken_for_the_window() -> None:
    rig = rig_with_one_worker()
    rig.announce("chat", *[0] * 20, **{**CHAT, "prompt_bytes": 400})
    assert len(rig.grants) == 20
    guessed_tokens = 400 * FIRST_TOKENS_PER_BYTE + FIRST_TEMPLATE_TOKENS
    assert {grant.booked_blocks for grant in rig.grants} == {-(-(guessed_tokens + 2) // BLOCK_TOKENS)}


def test_what_already_waits_is_booked_by_what_is_learned() -> None:
    rig = rig_with_one_worker()
    rig.announce("chat", *[0] * 40, **CHAT)
    for number in range(LEAST_PROMPTS):
        grant = rig.grants[number]
        assert grant.booked_blocks == WINDOW_TOKENS // BLOCK_TOKENS
        tell_the_prompt(rig, grant, 2 * number + 1)
        answer(rig, grant, 2 * number + 2)
    since = [grant.booked_blocks for grant in rig.grants if grant.request_id in rig.worker("w").ledger]
    assert since.count(PROMPT_BLOCKS) >= len(since) - 4
    assert rig.worker("w").ledger.overcommitted_blocks <= CAPACITY_BLOCKS * AHEAD_SHARE


def test_one_aside_is_looked_at_again_when_prompts_are_known() -> None:
    rig = rig_with_one_worker()
    small = CAPACITY_BLOCKS // 5
    rig.open("small", m.EngineShape(small, BLOCK_TOKENS, WINDOW_TOKENS, 256))
    rig.tell(m.DrainRequested("w"))
    short = {**CHAT, "max_tokens": 250}
    (waits,) = rig.announce("chat", 0, **short)
    assert waits not in rig.granted
    for number in range(LEAST_PROMPTS):
        rig.announce("chat", 0, **{**short, "prompt_bytes": 400})
        tell_the_prompt(rig, rig.grants[-1], 2 * number + 1, 100)
        answer(rig, rig.grants[-1], 2 * number + 2)
    assert rig.granted[-1] == waits
    assert rig.grants[-1].worker_id == "small"


def test_a_start_that_was_booked_does_not_outlive_what_it_was_booked_by() -> None:
    """A head that saves on a small worker turns out to need more than that has: it must not keep it idle."""
    chat = {"prompt_tokens": 0, "max_tokens": 20, "chat": True}
    rig = Rig({"chat": Share(), "other": Share()}, "predictive")
    rig.open("small", m.EngineShape(400, BLOCK_TOKENS, WINDOW_TOKENS, 256))
    rig.open("big", m.EngineShape(CAPACITY_BLOCKS, BLOCK_TOKENS, WINDOW_TOKENS, 256))
    rig.tell(m.DrainRequested("small"))
    rig.announce("chat", *[0] * LEAST_PROMPTS, **{**chat, "prompt_bytes": 10})
    tiny = list(rig.grants)
    rig.announce("other", *[4000] * 12, max_tokens=20)
    rig.tell(m.DrainRequested("small", undo=True))
    rig.wait(1000)
    (head,) = rig.announce("chat", 0, **{**chat, "prompt_bytes": 5000})
    saving = rig.machine._arbiter._savings.on(rig.worker("small"))
    assert saving is not None
    assert saving.entry.request_id == head
    for number, grant in enumerate(tiny):  # ten bytes, sixty tokens: most of it is the template's
        tell_the_prompt(rig, grant, number + 1, 60)
    assert rig.machine._arbiter._savings.on(rig.worker("small")) is not saving
    (on_small,) = [grant for grant in rig.grants if grant.worker_id == "small"]
    rig.finish(on_small)
    for _ in range(10):
        rig.announce("other", 1500, max_tokens=20)
        rig.wait(3000)
        rig.tell(m.Tick())
    assert [grant.worker_id for grant in rig.grants].count("small") > 1
