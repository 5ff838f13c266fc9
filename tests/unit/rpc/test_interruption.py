"""What a task does is ended from outside with an error, and whoever else cancels the task does so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from services.rpc.interruption import Interruption


class WhyError(Exception):
    """Why a body ends."""


class Body:
    """A task within an interruption of a body within another."""

    def __init__(self, during: Exception | None = None) -> None:
        self.outer: Interruption | None = None
        self.inner: Interruption | None = None
        self.left = -1
        """Cancellations of the task that nothing has answered for when both bodies are over."""
        self.during = during
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            with Interruption() as self.outer, Interruption() as self.inner:
                try:
                    await asyncio.Event().wait()
                finally:
                    if self.during:
                        raise self.during
        finally:
            self.left = self.task.cancelling()

    async def ends(self, *steps: Callable[[], object]) -> BaseException | None:
        """Return how the task ended when all of these have happened in one moment."""
        await asyncio.sleep(0)
        for step in steps:
            step()
        await asyncio.wait([self.task])
        return None if self.task.cancelled() else self.task.exception()


def end(body: Body, outer: bool, error: Exception) -> Callable[[], object]:
    def ends() -> object:
        interruption = body.outer if outer else body.inner
        assert interruption is not None
        return interruption.end(error)

    return ends


@pytest.mark.parametrize("outer", [False, True])
async def test_a_body_ends_with_the_first_error_it_is_to_end_with(outer: bool) -> None:
    body, why = Body(), WhyError()
    assert await body.ends(end(body, outer, why), end(body, outer, WhyError())) is why
    assert why.__suppress_context__, "and nobody reads of a cancellation"
    assert body.left == 0


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("ended_first", [False, True])
async def test_a_cancellation_of_somebody_elses_in_the_same_moment_stays_one(outer: bool, ended_first: bool) -> None:
    body = Body()
    steps: list[Callable[[], object]] = [end(body, outer, WhyError()), body.task.cancel]
    assert await body.ends(*steps if ended_first else reversed(steps)) is None
    assert body.left == 1


async def test_of_two_that_are_to_end_in_one_moment_the_outer_tells_why() -> None:
    body, why = Body(), WhyError()
    assert await body.ends(end(body, False, WhyError()), end(body, True, why)) is why
    assert body.left == 0


async def test_a_body_that_ends_by_an_error_of_its_own_meanwhile_keeps_it() -> None:
    own = ValueError("own")
    body = Body(own)
    assert await body.ends(end(body, False, WhyError())) is own
    assert body.left == 0


async def test_a_body_that_is_over_is_not_ended() -> None:
    with Interruption() as interruption:
        pass
    assert not interruption.end(WhyError())
    await asyncio.sleep(0)


async def test_what_a_cancelled_task_does_at_its_end_can_be_ended_too() -> None:
    inside: list[Interruption] = []
    cleaned = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with suppress(WhyError), Interruption() as interruption:
                inside.append(interruption)
                await asyncio.Event().wait()
            cleaned.set()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert inside[0].end(WhyError())
    await asyncio.wait([task])
    assert cleaned.is_set()
    assert task.cancelled()
