"""What cancel, delete, requeue and watch are about: names, however many, or all of a batch or of the dead letters."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import penstock
from penstock.queue.v1 import queue_pb2 as pb
from tests.support.fake_queue import FakeQueue, serving

MOST = 10_000
"""Names that a queue takes in one call."""

NAMES = [f"r-{number}" for number in range(2 * MOST + 1)]


class Strict(FakeQueue):
    """Refuses more names in a call than a queue takes, and remembers how many there were in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    async def _named(self, request: Any, context: Any) -> list[str]:
        names = list(request.request_ids.ids)
        assert 0 < len(names) <= MOST
        self.calls.append(len(names))
        await self._maybe_unavailable(context)
        return names

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        names = await self._named(request, context)
        return pb.CancelResponse(cancelled=len(names) - 1, aborting=1, not_cancelled=names[:1])

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        return pb.DeleteResponse(deleted=len(await self._named(request, context)))

    async def RequeueDead(self, request: pb.RequeueDeadRequest, context: Any) -> pb.RequeueDeadResponse:
        names = await self._named(request, context)
        return pb.RequeueDeadResponse(requeued=len(names), not_dead=names[:1])


@pytest.fixture
def queue() -> Strict:
    return Strict()


async def test_more_names_than_a_call_takes_go_in_several_and_are_added_up(queue: Strict) -> None:
    firsts = (NAMES[0], NAMES[MOST], NAMES[2 * MOST])
    async with serving(queue) as address, penstock.Client(address, retry_for_s=20) as client:
        assert await client.cancel(*NAMES) == penstock.Cancelled(2 * MOST - 2, 3, firsts)
        queue.unavailable_calls = 1
        assert await client.delete(*NAMES) == len(NAMES)
        assert await client.requeue(*NAMES) == penstock.Requeued(len(NAMES), firsts)
    assert queue.calls == [MOST, MOST, 1, MOST, MOST, MOST, 1, MOST, MOST, 1]


async def test_a_name_that_is_given_twice_goes_once(queue: Strict) -> None:
    """In two calls it would be requeued twice, if it had died again in between."""
    async with serving(queue) as address, penstock.Client(address) as client:
        assert (await client.requeue(*NAMES, *NAMES)).requeued == len(NAMES)


async def _watched(client: penstock.Client, **options: Any) -> None:
    async for _ in client.watch(**options):
        pass


BOTH: dict[str, tuple[str, Callable[[penstock.Client], Awaitable[object]]]] = {
    "cancel": ("batch", lambda client: client.cancel("r-1", batch="b")),
    "delete": ("batch", lambda client: client.delete("r-1", batch="b")),
    "delete, no batch": ("batch", lambda client: client.delete("r-1", batch="")),
    "requeue": ("all_dead", lambda client: client.requeue("r-1", all_dead=True)),
    "watch": ("batch", lambda client: _watched(client, batch="b", request_ids=["r-1"])),
}


@pytest.mark.parametrize("call", BOTH)
async def test_names_beside_what_means_all_of_it_are_refused(queue: Strict, call: str) -> None:
    field, make = BOTH[call]
    async with serving(queue) as address, penstock.Client(address) as client:
        with pytest.raises(penstock.InvalidRequest, match=f"^request_ids: .* {field}") as refused:
            await make(client)
    assert refused.value.param == "request_ids"
    assert queue.calls == []


async def test_a_request_is_named_in_one_way(queue: Strict) -> None:
    async with serving(queue) as address, penstock.Client(address) as client:
        with pytest.raises(penstock.InvalidRequest, match=r"^idempotency_key: given beside request_id") as refused:
            await client.get("r-0", idempotency_key="k")
        assert refused.value.param == "idempotency_key"


@pytest.mark.parametrize("retry_for_s", [None, "60", math.nan])
async def test_a_patience_is_a_number(retry_for_s: Any) -> None:
    with pytest.raises(penstock.InvalidRequest, match=r"^retry_for_s: must be a number of seconds, not "):
        penstock.Client("127.0.0.1:1", retry_for_s=retry_for_s)
