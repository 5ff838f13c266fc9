"""Requests as programs write them: mypy, which looks at the tests too, takes each of these, and so does the client."""

from __future__ import annotations

from typing import Any

import penstock
from tests.support.fake_queue import FakeQueue, served


def test_requests_as_programs_write_them() -> None:
    queue = FakeQueue()
    with served(queue) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        plain = [{"prompt": f"p {n}", "max_tokens": 2} for n in range(2)]
        called = [dict(prompt=f"c {n}", max_tokens=2) for n in range(2)]  # noqa: C408
        for requests in plain, called:
            assert [ack.error for ack in client.submit_many(requests)] == [None, None]
        assert not any(ack.error for ack in client.submit_many({"prompt": f"g {n}", "n": 1} for n in range(2)))
        shared: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3}
        assert client.generate(prompt="shared", **shared).text == "SHARED"
        whole: penstock.RequestFields = {"prompt": "whole", "max_tokens": 3}
        assert client.generate(**whole).text == "WHOLE"
    assert len(queue.requests) == 8
