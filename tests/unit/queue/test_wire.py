"""What the queue says of a request whose prompt it does not pass on."""

from __future__ import annotations

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2
from services.queue import wire
from services.queue.core.effects import Announce
from services.scheduler.core.messages import Announced
from services.scheduler.wire import from_queue


def announced(ids: int, **sampling: int) -> queue_pb2.Announce:
    """Return what the scheduler hears of a prompt of so many token ids."""
    request = request_pb2.Request(
        channel="batch",
        token_ids=request_pb2.TokenIds(ids=range(ids)),
        sampling=request_pb2.SamplingParams(**sampling) if sampling else None,  # type: ignore[arg-type]
    )
    meta = wire.meta_of(request, 0)
    return queue_pb2.QueueToScheduler.FromString(wire.announce(Announce(1, "r1", 1, 1, meta))).announce


@pytest.mark.parametrize("last", [True, False])
def test_a_scheduler_hears_which_attempt_is_the_last(last: bool) -> None:
    meta = wire.meta_of(request_pb2.Request(channel="batch", text="t"), 0)
    said = queue_pb2.QueueToScheduler.FromString(wire.announce(Announce(1, "r1", 1, 3, meta, last)))
    heard = from_queue(said)
    assert isinstance(heard, Announced)
    assert heard.last_attempt is last


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, 10_000),
        ({"max_tokens": 5}, 10_000),
        ({"truncate_prompt_tokens": 4096}, 4096),
        ({"truncate_prompt_tokens": 20_000}, 10_000),
        # As long as the window of a model that only its worker knows.
        ({"truncate_prompt_tokens": -1}, 0),
    ],
)
def test_a_prompt_of_token_ids_is_as_long_as_what_is_left_of_it(sampling: dict[str, int], tokens: int) -> None:
    said = announced(10_000, **sampling)
    assert (said.prompt_tokens, said.prompt_bytes) == (tokens, 0)
