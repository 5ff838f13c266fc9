"""Quotas: what is let in, what is counted, and that the counts are those of what waits, whatever happens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.queue.core.effects import Submitted
from services.queue.core.entry import Failure
from services.queue.core.lifecycle import State
from services.queue.core.messages import (
    Cancel,
    Complete,
    GiveBack,
    NewRequest,
    RequeueDead,
    SetQuotas,
    Submit,
    WorkerOpened,
)
from services.queue.core.quotas import LARGER_THAN_QUOTA, MOST_ALIKE, OVER_QUOTA, Quota, Waiting
from tests.support.queueing import LEASE_NS, PAYLOAD, Queue, meta

TENANTS = ("acme", "beta", "free")
QUOTAS = {"acme": Quota(requests=2, bytes=100), "beta": Quota(bytes=50)}


def submitted(queue: Queue, *news: NewRequest, together: bool = False) -> Submitted:
    (answer,) = (effect for effect in queue.step(Submit(0, news, together)) if isinstance(effect, Submitted))
    return answer


def new(tenant: str = "acme", size: int = 10, key: str = "", known: int | None = None) -> NewRequest:
    return NewRequest(meta(tenant=tenant, payload_bytes=size, idempotency_key=key), PAYLOAD, known)


def limited(**quotas: Quota) -> Queue:
    queue = Queue()
    queue.step(SetQuotas(quotas))
    return queue


def test_what_is_beyond_is_refused_by_the_quotas_name_and_value() -> None:
    queue = limited(acme=Quota(requests=2, bytes=100))
    answer = submitted(queue, new(), new(size=80), new(), new("beta", 1000))
    assert [bool(name) for name, _ in answer.acks] == [True, True, False, True]
    assert set(answer.refused) == {2}
    failure = answer.refused[2]
    assert failure.code == OVER_QUOTA
    assert failure.message == "max_waiting_requests of tenant acme is 2; 2 wait already, 1 more were sent"
    queue.step(Cancel(1, (answer.acks[0][0],)))
    failure = submitted(queue, new(size=21)).refused[0]
    assert failure.message == "max_waiting_bytes of tenant acme is 100; 80 wait already, 21 more were sent"
    assert not submitted(queue, new(size=20)).refused


def test_together_means_all_or_none() -> None:
    queue = limited(acme=Quota(requests=2))
    answer = submitted(queue, new(), new(), new(), together=True)
    assert answer.acks == (("", False),) * 3
    assert set(answer.refused) == {0, 1, 2}
    assert not queue.machine.book.entries
    assert not submitted(queue, new(), new(), together=True).refused


def test_what_no_waiting_would_let_in_is_told_apart() -> None:
    queue = limited(acme=Quota(requests=2, bytes=100), kept_out=Quota(requests=0, bytes=0))
    submitted(queue, new(size=90))
    answer = submitted(queue, new(size=101), new(size=100), new("kept_out"))
    assert [answer.refused[place].code for place in range(3)] == [LARGER_THAN_QUOTA, OVER_QUOTA, OVER_QUOTA]
    assert answer.refused[0].message == "max_waiting_bytes of tenant acme is 100; 101 were sent at once"
    together = submitted(queue, new(), new(), new(), together=True).refused
    assert {failure.code for failure in together.values()} == {LARGER_THAN_QUOTA}


def test_what_no_waiting_would_let_in_is_told_so_while_another_quota_is_full() -> None:
    queue = limited(acme=Quota(requests=1, bytes=100), kept_out=Quota(requests=0, bytes=100))
    submitted(queue, new())
    refused = submitted(queue, new(size=101), new("kept_out", 101)).refused
    assert [refused[place].code for place in range(2)] == [LARGER_THAN_QUOTA] * 2
    assert refused[0].message == "max_waiting_bytes of tenant acme is 100; 101 were sent at once"
    assert submitted(queue, new(size=100)).refused[0].code == OVER_QUOTA


def test_one_that_is_known_takes_nothing() -> None:
    queue = limited(acme=Quota(requests=1))
    ((name, _),) = submitted(queue, new(key="k")).acks
    assert submitted(queue, new(key="k", known=1)).acks == ((name, False),)
    assert submitted(queue, new(key="k", known=1), new(key="k", known=1), together=True).acks == ((name, False),) * 2


def test_what_runs_takes_nothing_and_what_comes_back_is_not_refused() -> None:
    queue = limited(acme=Quota(requests=1))
    ((first, _),) = submitted(queue, new()).acks
    queue.step(WorkerOpened(1, "w", "life", ()))
    lease = queue.claim(1, first)
    assert lease is not None
    assert not submitted(queue, new()).refused
    queue.step(GiveBack(1, (lease,)))
    assert queue.machine.book.waiting.by_tenant["acme"].requests == 2
    assert submitted(queue, new()).refused


def test_those_of_which_most_waits_are_found_among_however_many() -> None:
    """A hundred flood, a thousand have a request each: whoever asks has the ten largest, and looks at few others."""
    waiting = Waiting()
    for number in range(100):
        for _ in range(64 + number):
            waiting.enter(meta(tenant=f"flood-{number}", payload_bytes=3))
    for number in range(5000):
        waiting.enter(meta(tenant=f"small-{number}", payload_bytes=1))
    most = waiting.most(10)
    assert [(told.tenant, told.requests, told.bytes) for told in most] == [
        (f"flood-{number}", 64 + number, 3 * (64 + number)) for number in range(99, 89, -1)
    ]
    for number in range(100):
        for _ in range(64 + number - 1):
            waiting.leave(meta(tenant=f"flood-{number}", payload_bytes=3))
    assert [told.requests for told in waiting.most(10)] == [1] * 10
    assert len(waiting.most(10_000)) == MOST_ALIKE, "a look at all of them would keep everybody waiting"


class Waits(RuleBasedStateMachine):
    """Requests of three tenants through every way into a line and out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.quotas: dict[str, Quota] = {}

    def names(self) -> list[str]:
        return [entry.name for entry in self.queue.machine.book.entries.values()]

    @rule(quotas=st.sampled_from([{}, QUOTAS]))
    def set_quotas(self, quotas: dict[str, Quota]) -> None:
        self.quotas = quotas
        self.queue.step(SetQuotas(quotas))

    @rule(
        asked=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 60)), min_size=1, max_size=4),
        together=st.booleans(),
    )
    def submit(self, asked: list[tuple[str, int]], together: bool) -> None:
        before = self.sums()
        answer = submitted(self.queue, *(new(tenant, size) for tenant, size in asked), together=together)
        after = self.sums()
        if together:
            assert len(answer.refused) in {0, len(asked)}
        for tenant, quota in self.quotas.items():
            count, size = after.get(tenant, (0, 0))
            grown = after.get(tenant) != before.get(tenant)
            assert not grown or quota.requests is None or count <= quota.requests
            assert not grown or quota.bytes is None or size <= quota.bytes

    @rule(index=st.integers(0, 20), ending=st.sampled_from(["give back", "fail", "complete", "lose"]))
    def run(self, index: int, ending: str) -> None:
        names = self.names()
        if not names:
            return
        self.queue.step(WorkerOpened(1, "w", "life", ()))
        lease = self.queue.claim(1, names[index % len(names)])
        if lease is None:
            return
        if ending == "give back":
            self.queue.step(GiveBack(1, (lease,)))
        elif ending == "fail":
            self.queue.step(Complete(1, lease, None, Failure("oom", "out of memory"), None))
        elif ending == "complete":
            self.queue.complete(1, lease)
        else:
            self.queue.tick(LEASE_NS + 1)

    @rule(index=st.integers(0, 20))
    def cancel(self, index: int) -> None:
        if names := self.names():
            self.queue.step(Cancel(1, (names[index % len(names)],)))

    @rule()
    def requeue(self) -> None:
        self.queue.step(RequeueDead(1, None))

    @rule()
    def restart(self) -> None:
        self.queue.restart()
        self.queue.step(SetQuotas(self.quotas))

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return (requests, bytes) that wait of each tenant, added up from the requests."""
        found: dict[str, tuple[int, int]] = {}
        for entry in self.queue.machine.book.entries.values():
            if entry.state is State.READY:
                count, size = found.get(entry.meta.tenant, (0, 0))
                found[entry.meta.tenant] = (count + 1, size + entry.meta.payload_bytes)
        return found

    @invariant()
    def counts_are_sums(self) -> None:
        counted = self.queue.machine.book.waiting.by_tenant
        sums = self.sums()
        assert {tenant: (held.requests, held.bytes) for tenant, held in counted.items()} == sums
        most = sorted((-count, -size, tenant) for tenant, (count, size) in sums.items())
        told = [(-told.requests, -told.bytes, told.tenant) for told in self.queue.machine.book.waiting.most(3)]
        assert sorted(told) == most
        assert [place[0] for place in told] == [place[0] for place in most]


Waits.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestWaits = Waits.TestCase
