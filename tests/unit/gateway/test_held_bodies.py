"""What the gateway holds of bodies: bytes that count until they are submitted, and nothing after that."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from penstock.openai.bodies import CHAT_URL, ChatBody
from penstock.queue.v1.queue_pb2 import IdentifyResponse
from services.gateway.admission import Asked
from services.gateway.shares import Shares
from tests.support.asgi import post
from tests.unit.gateway.test_generation import CHAT, Gateway, gateway, until

__all__ = ["gateway"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_body_counts_until_it_is_submitted(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Else what a queue that is away makes the gateway hold would have no bound."""
    monkeypatch.setattr(gateway.parts.intake, "_shares", Shares(len(json.dumps(CHAT)) + 10))
    gateway.queue.paused = True
    gateway.queue.acks.clear()
    visit = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: bool(gateway.queue.requests))
    if leaves:
        visit.leave()
        await visit.whole()
    refused = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: refused.task.done() or len(gateway.queue.requests) == 2)
    assert (refused.answer.status, refused.answer.error["code"]) == (503, "overloaded")
    gateway.queue.acks.set()
    await until(lambda: gateway.parts.intake.held_bytes == 0)
    again = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: len(gateway.queue.requests) == 2)
    for each in (visit, again):
        each.leave()
        await each.whole()
    await until(lambda: gateway.parts.intake.held_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_waits_has_let_go_of_its_body(gateway: Gateway, stream: bool) -> None:
    """Parsed, a body takes many times what it took on the wire, and it may wait for hours."""
    gateway.queue.paused = True
    marked = {**CHAT, "stream": stream, "seed": 77_001}  # other tests of this process may keep bodies of theirs
    visit = post(gateway.app, CHAT_URL, marked)
    await until(lambda: len(gateway.queue.followed) == 1)
    gc.collect()
    kept = [found for found in gc.get_objects() if type(found) in (ChatBody, Asked)]
    assert not [found for found in kept if getattr(getattr(found, "body", found), "seed", None) == 77_001]
    visit.leave()
    await visit.whole()


async def test_a_body_is_of_the_share_of_who_sends_it(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    class Acmes:
        async def identify(self) -> IdentifyResponse:
            return IdentifyResponse(role="client", tenant="acme")

    doorman: Any = gateway.parts.doorman
    monkeypatch.setattr(doorman, "_client", Acmes())
    gateway.queue.paused = True
    gateway.queue.acks.clear()
    visit = post(gateway.app, CHAT_URL, CHAT)
    await until(lambda: bool(gateway.queue.requests))
    assert gateway.parts.intake._shares._had == {("acme", True): len(json.dumps(CHAT))}
    gateway.queue.acks.set()
    visit.leave()
    await visit.whole()
    await until(lambda: not gateway.parts.intake._shares._had)
