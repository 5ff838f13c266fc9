"""Offers: a request that is stored meets the worker that has credits for it, and nobody else's turn is taken."""

from __future__ import annotations

import pytest

from penstock.queue.v1 import queue_pb2
from penstock.request.v1.request_pb2 import Request
from services.queue import wire
from services.queue.core.effects import Announce, Deliver, Gone, Refused, RefusedReason, Submitted
from services.queue.core.entry import RequestMeta
from services.queue.core.messages import Cancel, Claim, NewRequest, Offer, Submit, Withdraw, WorkerClosed, WorkerOpened
from services.queue.core.offers import MOST_OF_A_STREAM
from services.rpc.strict import BadInputError
from tests.support.queueing import PAYLOAD, Queue, meta

WORKER = 7
OFFER = Offer(WORKER, "standing/1", "batch", "", False, 100, 0, 4)


@pytest.fixture
def queue() -> Queue:
    """A queue with a scheduler, and a worker that offers to run one request."""
    queue = Queue()
    queue.open_backlog(1)
    queue.step(WorkerOpened(WORKER, "w", "life", ()), OFFER)
    return queue


def submit(queue: Queue, *metas: RequestMeta) -> list[object]:
    """Submit requests in one frame; return what follows."""
    return list(queue.step(Submit(0, tuple(NewRequest(m, PAYLOAD) for m in metas))))


def delivered(effects: list[object]) -> list[Deliver]:
    return [effect for effect in effects if isinstance(effect, Deliver)]


def announced(effects: list[object]) -> list[str]:
    return [effect.request_id for effect in effects if isinstance(effect, Announce)]


def test_a_request_that_fits_is_delivered_as_it_is_stored_and_never_announced(queue: Queue) -> None:
    effects = submit(queue, meta(traceparent="00-a-b-01"))
    (delivery,) = delivered(effects)
    assert (delivery.stream, delivery.grant, delivery.payload) == (WORKER, "standing/1", PAYLOAD)
    assert not announced(effects)
    assert not [effect for effect in effects if isinstance(effect, Gone)], "of what was not announced"
    (answer,) = (effect for effect in effects if isinstance(effect, Submitted))
    assert answer.acks == ((delivery.lease.request_id, True),)
    queue.complete(WORKER, delivery.lease)
    assert not queue.machine.book.entries
    assert not delivered(submit(queue, meta())), "an offer is for one request"


def test_one_frame_meets_one_offer_and_the_rest_waits(queue: Queue) -> None:
    effects = submit(queue, meta(), meta(), meta())
    (delivery,) = delivered(effects)
    assert delivery.lease.request_id not in announced(effects)
    assert len(announced(effects)) == 2


@pytest.mark.parametrize(
    "other",
    [
        meta(channel="interactive"),
        meta(model="m"),
        meta(chat=True),
        meta(n=2),
        meta(prompt_bytes=101),
        meta(prompt_bytes=0),
        meta(prompt_bytes=0, prompt_tokens=1),
        meta(max_tokens=5),
        meta(max_tokens=0),
    ],
)
def test_what_does_not_fit_waits_for_its_grant(queue: Queue, other: RequestMeta) -> None:
    effects = submit(queue, other)
    assert not delivered(effects)
    assert len(announced(effects)) == 1
    assert len(queue.machine._workers._offers) == 1, "the offer still stands"


@pytest.mark.parametrize(
    ("exactly", "bounds"),
    [
        (meta(prompt_bytes=100), {}),
        (meta(max_tokens=4), {}),
        (meta(prompt_bytes=0, prompt_tokens=8), {"most_prompt_bytes": 0, "most_prompt_tokens": 8}),
    ],
)
def test_what_is_as_large_as_the_offer_fits(queue: Queue, exactly: RequestMeta, bounds: dict[str, int]) -> None:
    queue.step(Withdraw(WORKER, "standing/1"), OFFER._replace(**bounds))  # type: ignore[arg-type]
    assert delivered(submit(queue, exactly))


def test_what_one_request_tells_bounds_nothing_of_one_that_does_not_tell_it(queue: Queue) -> None:
    queue.step(Withdraw(WORKER, "standing/1"), OFFER._replace(most_output_tokens=0, most_prompt_tokens=8))
    assert not delivered(submit(queue, meta(max_tokens=4, prompt_tokens=8)))
    queue.step(*(Cancel(0, (entry.name,)) for entry in list(queue.machine.book.entries.values())))
    assert not delivered(submit(queue, meta(max_tokens=0, prompt_tokens=0)))
    queue.step(*(Cancel(0, (entry.name,)) for entry in list(queue.machine.book.entries.values())))
    assert delivered(submit(queue, meta(max_tokens=0, prompt_tokens=8)))


def test_what_comes_late_meets_no_offer(queue: Queue) -> None:
    assert not delivered(submit(queue, meta(deadline_ns=queue.now_ns)))
    queue.tick(1)
    assert delivered(submit(queue, meta(deadline_ns=queue.now_ns + 1)))


def test_nobody_passes_those_who_wait_for_the_same(queue: Queue) -> None:
    submit(queue, meta(prompt_bytes=1000))
    assert not delivered(submit(queue, meta()))


def test_a_withdrawn_offer_is_answered_unless_a_request_has_met_it(queue: Queue) -> None:
    assert queue.step(Withdraw(WORKER, "standing/1")) == [Refused(WORKER, "standing/1", RefusedReason.WITHDRAWN)]
    assert not delivered(submit(queue, meta()))
    queue.step(Claim(WORKER, queue.submit(meta(model="n"))[0]))
    queue.step(OFFER._replace(grant="standing/2", model="o"))
    assert delivered(submit(queue, meta(model="o")))
    assert queue.step(Withdraw(WORKER, "standing/2")) == []
    assert queue.step(Withdraw(8, "standing/2")) == []


def test_offers_end_with_their_stream(queue: Queue) -> None:
    queue.step(WorkerOpened(8, "w", "life", ()))
    assert not delivered(submit(queue, meta()))
    queue.step(Offer(8, "standing/1", "interactive", "", False, 100, 0, 4), WorkerClosed(8))
    assert not delivered(submit(queue, meta(channel="interactive")))
    queue.step(OFFER)  # of a stream that is over
    assert not delivered(submit(queue, meta(channel="interactive")))


def test_a_worker_with_as_many_leases_as_it_may_have_is_given_no_more(queue: Queue) -> None:
    names = queue.submit(*[meta(model="n")] * queue.rules.max_inflight)
    assert all(queue.claim(WORKER, name) for name in names)
    assert not delivered(submit(queue, meta()))


def test_a_worker_offers_only_so_much(queue: Queue) -> None:
    offers = [OFFER._replace(grant=f"standing/{i}") for i in range(MOST_OF_A_STREAM + 1)]
    refused = Refused(WORKER, offers[-1].grant, RefusedReason.TOO_MANY)
    assert queue.step(*offers[1:], offers[0], offers[1]) == [Refused(WORKER, "standing/0", RefusedReason.TOO_MANY)]
    queue.step(Withdraw(WORKER, offers[1].grant), offers[0])
    assert queue.step(offers[-1]) == []
    assert queue.step(offers[1]) == [refused._replace(request_id=offers[1].grant)]


def test_the_offer_that_stood_longest_is_met_first(queue: Queue) -> None:
    queue.step(WorkerOpened(8, "v", "life", ()), Offer(8, "standing/2", "batch", "", False, 100, 0, 4))
    streams = [delivery.stream for _ in range(2) for delivery in delivered(submit(queue, meta()))]
    assert streams == [WORKER, 8]


def test_a_delivery_says_for_which_offer_and_what_the_scheduler_is_to_know(queue: Queue) -> None:
    request = meta(prompt_bytes=9, priority=2, traceparent="00-a-b-01")
    (delivery,) = delivered(submit(queue, request))
    told = queue_pb2.QueueToWorker.FromString(wire.deliver(delivery, PAYLOAD)).deliver
    assert told.grant == "standing/1"
    assert told.request == Request(text="payload", request_id=delivery.lease.request_id)
    known = told.announced
    assert (known.request_id, known.attempt, known.channel) == (delivery.lease.request_id, 1, "batch")
    assert (known.prompt_bytes, known.max_tokens, known.n, known.traceparent) == (9, 4, 1, "00-a-b-01")


def test_an_offer_is_read_whole_and_needs_a_name() -> None:
    offer = queue_pb2.Offer(
        grant="g", channel="c", model="m", chat=True, most_prompt_bytes=1, most_prompt_tokens=2, most_output_tokens=3
    )
    read = wire.worker_message(WORKER, queue_pb2.WorkerToQueue(offer=offer))
    assert read == Offer(WORKER, "g", "c", "m", True, 1, 2, 3)
    withdraw = queue_pb2.WorkerToQueue(withdraw=queue_pb2.Withdraw(grant="g"))
    assert wire.worker_message(WORKER, withdraw) == Withdraw(WORKER, "g")
    with pytest.raises(BadInputError, match="offer"):
        wire.worker_message(WORKER, queue_pb2.WorkerToQueue(offer=queue_pb2.Offer()))
