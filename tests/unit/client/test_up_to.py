"""What a delete of a batch, or a requeue of all, takes that is repeated: no more than there was when it was asked."""

from __future__ import annotations

import pytest

import penstock
from tests.support.fake_queue import FakeQueue, serving


@pytest.mark.parametrize(("cursor", "up_to"), [(7, 7), (0, None)])
async def test_no_more_is_taken_than_there_was(cursor: int, up_to: int | None) -> None:
    """A queue of before tells no cursor, and one that does may answer for it."""
    queue = FakeQueue()
    queue.cursor = cursor
    async with serving(queue) as address, penstock.Client(address) as client:
        await client.delete(batch="b")
        await client.requeue(all_dead=True)
        await client.delete("r")
    assert queue.up_to == [up_to, up_to, None]
