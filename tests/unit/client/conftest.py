"""A blocking client and the queue that it calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock
from tests.support.fake_queue import FakeQueue, served


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
def client(queue: FakeQueue) -> Iterator[penstock.SyncClient]:
    with served(queue) as address, penstock.SyncClient(address, retry_for_s=5) as client:
        yield client
