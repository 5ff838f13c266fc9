"""A request of many that cannot even be made is refused by itself, and the others go on."""

from __future__ import annotations

from typing import Any

import penstock
from penstock.request.v1 import request_pb2
from tests.support.fake_queue import FakeQueue, serving


async def test_a_request_that_cannot_be_made_is_refused_and_the_others_go_on() -> None:
    queue = FakeQueue()
    wanted: list[Any] = [{}, {"prompt": "a"}, {"prompt": "b", 7: 1}, request_pb2.Request(text="c"), "d"]
    async with serving(queue) as address, penstock.Client(address) as client:
        acks = sorted([ack async for ack in client.submit_many(wanted)], key=lambda ack: ack.index)
    assert [ack.error and (ack.error.code, ack.error.param) for ack in acks] == [
        ("invalid_request", "prompt"), None, ("unknown_field", "7"), None, ("invalid_type", "request"),
    ]  # fmt: skip
    assert [request.text for request in queue.requests] == ["a", "c"]
