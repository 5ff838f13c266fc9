"""Requests that name no `max_tokens`, the usual call of a chat client, are booked at what their prompts may need."""

from __future__ import annotations

import pytest

from services.scheduler.core import messages as m
from services.scheduler.core.channel import Share
from services.scheduler.core.predictive import AHEAD_SHARE
from tests.support.scheduling import Rig

BLOCK_TOKENS, WINDOW_TOKENS, CAPACITY_BLOCKS = 16, 8192, 2000
CHAT = {"prompt_tokens": 0, "prompt_bytes": 16_000, "max_tokens": 0, "chat": True}
PROMPT_TOKENS, PROMPT_BLOCKS = 4000, 251


def rig_with_one_worker() -> Rig:
    rig = Rig({"chat": Share()}, "predictive")
    rig.open("w", m.EngineShape(CAPACITY_BLOCKS, BLOCK_TOKENS, WINDOW_TOKENS, 256))
    return rig


def run_one(rig: Rig, seq: int) -> None:
    """Have one chat granted, tokenized, and answered with 200 tokens."""
    rig.announce("chat", 0, **CHAT)
    grant = rig.grants[-1]
    rig.tell(m.Gone(grant.request_id, m.GoneReason.CLAIMED))
    rig.tell(
        m.TokenizerAck(grant.epoch, grant.epoch, grant.request_id, 2 * seq, PROMPT_BLOCKS, prompt_tokens=PROMPT_TOKENS),
        m.CompletionAck(
            grant.epoch,
            grant.epoch,
            grant.request_id,
            2 * seq + 1,
            m.ReleaseCause.COMPLETED,
            output_tokens=200,
        ),
    )


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
