"""What bodies may have in memory: however many a tenant sends, others find room for theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import pytest
from starlette.types import Message

from services.gateway.intake import Intake
from services.gateway.limits import MAX_BODY_BYTES
from services.gateway.places import HELD_BYTES
from services.gateway.problem import Problem
from services.gateway.shares import RESERVE, Body, Shares
from tests.support.waiting import wait_for_async

MIB = 2**20
JSON = {"content-type": "application/json"}


class Sender:
    """ASGI's receive side: a body that comes in parts, all of it or all but its end."""

    def __init__(self, size_bytes: int, ends: bool) -> None:
        self.size_bytes = self.left_bytes = size_bytes
        self.ends = ends

    async def __call__(self) -> Message:
        await asyncio.sleep(0)
        part_bytes = min(self.left_bytes, HELD_BYTES)
        content = b"{}" if self.left_bytes == self.size_bytes else b""
        self.left_bytes -= part_bytes
        if not part_bytes and not self.ends:
            await asyncio.Event().wait()
        return {
            "type": "http.request",
            "body": content.ljust(part_bytes),
            "more_body": self.left_bytes > 0 or not self.ends,
        }


async def status_of(reading: Awaitable[Any]) -> int:
    try:
        await reading
    except Problem as problem:
        return problem.status if problem.error["code"] == "overloaded" and problem.headers["retry-after"] else 0
    return 200


async def test_a_tenant_that_sends_many_large_bodies_keeps_no_other_ones_out() -> None:
    """Nor its own small ones."""
    intake = Intake(60)
    senders = [Sender(MAX_BODY_BYTES, ends=False) for _ in range(16)]
    slow = [asyncio.create_task(status_of(intake.read(JSON, sender, "a"))) for sender in senders]

    async def all_sent() -> bool:
        return all(task.done() or not sender.left_bytes for task, sender in zip(slow, senders, strict=True))

    await wait_for_async(all_sent, "all bodies to be sent but for their end, or refused")
    assert {task.result() for task in slow if task.done()} == {503}
    for tenant, size_bytes, status in [
        ("a", HELD_BYTES, 200),
        ("a", MAX_BODY_BYTES, 503),
        ("b", HELD_BYTES, 200),
        ("b", MAX_BODY_BYTES, 200),
    ]:
        sent = Sender(size_bytes, ends=True)
        assert (await status_of(intake.read(JSON, sent, tenant)), tenant, size_bytes) == (status, tenant, size_bytes)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert intake.held_bytes == 0


@pytest.mark.parametrize("tenants", [1, 2, 5, 20])
def test_whoever_has_large_bodies_some_bytes_are_left_to_small_ones(tenants: int) -> None:
    shares = Shares(256 * MIB)
    for tenant in map(str, range(tenants)):
        while (body := Body(shares, tenant)).take(MIB):
            assert body.take(0)
    assert shares.had_bytes <= 256 * MIB - 256 * MIB // RESERVE
    assert shares.had_bytes > 160 * MIB, "one alone has room for large ones"
    for tenant in map(str, range(tenants + 1)):
        assert Body(shares, tenant).take(HELD_BYTES)


@pytest.mark.parametrize("more_bytes", [1, HELD_BYTES])
def test_a_body_that_outgrows_a_small_one_is_a_large_one_with_all_it_has(more_bytes: int) -> None:
    shares = Shares(256 * MIB)
    while (body := Body(shares, "a")).take(HELD_BYTES) and body.take(more_bytes):
        pass
    body.give()  # it is refused
    assert 167 * MIB < shares.had_bytes <= 168 * MIB, "no more than three times what is left beside the reserve"
    small = [Body(shares, "a") for _ in range(500)]
    assert all(body.take(HELD_BYTES) for body in small), "it does not pay for its large ones"


def test_what_was_had_is_free_again() -> None:
    drawn = random.Random(7)
    shares = Shares(MIB)
    bodies = [Body(shares, tenant) for tenant in "aabbc"]
    had = 0
    for _ in range(2000):
        body, size_bytes = drawn.choice(bodies), drawn.choice([1, 1000, HELD_BYTES, 3 * HELD_BYTES])
        if drawn.random() < 0.2:
            had -= body._had_bytes
            body.give()
        elif body.take(size_bytes):
            had += size_bytes
        assert 0 <= had == shares.had_bytes <= MIB
    for body in bodies:
        body.give()
    assert (shares.had_bytes, shares._had) == (0, {})
