"""Who waits for room is let in by turns, tenant by tenant, and who goes meanwhile takes none."""

from __future__ import annotations

import asyncio

from services.rpc.waiters import FIRST_COME, Rank, SharedWindow


class Waiters:
    """Tasks that want to enter a window that has room for one."""

    def __init__(self) -> None:
        self.window = SharedWindow(1)
        self.entered: list[str] = []

    async def wait(self, tenant: str, name: str, rank: Rank = FIRST_COME) -> asyncio.Task[None]:
        """Return a task that waits in line."""

        async def enter() -> None:
            await self.window.enter(tenant, 1, rank)
            self.entered.append(name)

        task = asyncio.create_task(enter())
        await asyncio.sleep(0)
        return task

    async def drained(self) -> list[str]:
        """Let one in after the other until nobody waits; return who was, in order."""
        while self.window._count:
            self.window.leave(1)
            await asyncio.sleep(0)
        return self.entered


async def test_tenants_take_turns_and_each_is_let_in_by_age() -> None:
    waiters = Waiters()
    for tenant, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        await waiters.wait(tenant, name)
    assert waiters.entered == ["a1"], "there was room"
    assert await waiters.drained() == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_what_goes_on_comes_before_what_its_tenant_began_later() -> None:
    waiters = Waiters()
    await waiters.wait("a", "frame, first part")
    await waiters.wait("a", "cancel")
    await waiters.wait("b", "b1")
    await waiters.wait("a", "frame, second part", rank=(-1,))
    assert await waiters.drained() == ["frame, first part", "frame, second part", "b1", "cancel"]


async def test_who_goes_while_it_waits_takes_no_room() -> None:
    waiters = Waiters()
    await waiters.wait("a", "a1")
    gone = await waiters.wait("a", "a2")
    late = await waiters.wait("a", "a3")
    await waiters.wait("b", "b1")
    gone.cancel()
    await asyncio.sleep(0)
    waiters.window.leave(1)  # lets in a3, which goes before it knows
    late.cancel()
    await asyncio.wait([gone, late])
    assert gone.cancelled()
    assert late.cancelled()
    assert await waiters.drained() == ["a1", "b1"]
    assert waiters.window._count == 0


async def test_those_who_went_cost_their_tenant_no_turn_and_are_not_kept() -> None:
    waiters = Waiters()
    await waiters.wait("a", "a1")
    gone = [await waiters.wait("b", f"gone {number}") for number in range(50)]
    await waiters.wait("b", "b1")
    for number in range(2, 5):
        await waiters.wait("a", f"a{number}")
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    assert waiters.window.waiting == 4
    assert await waiters.drained() == ["a1", "b1", "a2", "a3", "a4"]
