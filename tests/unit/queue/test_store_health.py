"""Whether the store can be written: when that is tried again, what is refused meanwhile."""

from __future__ import annotations

import math

import pytest

from services.queue.core.messages import BacklogClosed, Cancel, Inspect, Tick
from services.queue.storage.health import HEAL_PAUSE_NS, NO_ROOM, TABLE, Ability, Event, StoreHealth
from services.queue.storage.store import StoreError
from tests.support.committing import HandClock
from tests.support.memory_store import MemoryStore

LEAST_FREE_BYTES = 1000


class FailedStore(MemoryStore):
    """A store whose last write failed, as one of files and records may have."""

    failed = ""
    given_up = False

    def write_failure(self) -> str:
        """Return what failed."""
        return self.failed

    def is_reserve_given_up(self) -> bool:
        """Return whether it is."""
        return self.given_up


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store() -> FailedStore:
    return FailedStore(LEAST_FREE_BYTES)


@pytest.fixture
def health(store: FailedStore, clock: HandClock) -> StoreHealth:
    return StoreHealth(store, clock, LEAST_FREE_BYTES)


def test_a_failed_write_is_tried_again_after_a_pause_and_then_after_each(health: StoreHealth, clock: HandClock) -> None:
    health.failed(StoreError("no medium"))
    assert not health.is_probe_due()
    clock.pass_ns(HEAL_PAUSE_NS)
    assert [health.is_probe_due(), health.is_probe_due()] == [True, False]
    clock.pass_ns(HEAL_PAUSE_NS)
    assert health.is_probe_due()


def test_what_another_writer_met_is_tried_at_once(health: StoreHealth, store: FailedStore) -> None:
    health.notice_failure()
    assert not health.broken
    health.failed(StoreError("no medium"))
    health.mended()
    store.failed = "no medium"
    health.notice_failure()
    assert "no medium" in health.broken
    assert health.is_probe_due()


def test_what_is_served_meanwhile(health: StoreHealth) -> None:
    messages = (Tick(), Cancel(1, ("r",)), Inspect(1, ("r",)), BacklogClosed(1))
    assert [health.serves(message) for message in messages] == [True] * 4
    health.failed(StoreError("no medium"))
    assert [health.serves(message) for message in messages] == [False, False, True, True]
    health.built(False)
    assert [health.serves(message) for message in messages] == [False, False, False, True]
    assert health.refusal() == health.broken


def test_a_nearly_full_disk_is_a_refusal_once_it_was_looked_at(
    health: StoreHealth, store: FailedStore, clock: HandClock
) -> None:
    store.free_bytes = LEAST_FREE_BYTES - 1
    assert not health.refusal()
    health.check_disk()
    assert "999 bytes free" in health.refusal()
    assert health.is_disk_full
    store.free_bytes = LEAST_FREE_BYTES
    health.check_disk()
    assert health.refusal(), "looked at a moment ago"
    clock.pass_ns(HEAL_PAUSE_NS)
    health.check_disk()
    assert not health.refusal()


class LostStore(MemoryStore):
    """A store whose data directory may be gone."""

    gone = ""

    def disk_free_bytes(self) -> int:
        """Raise StoreError with what is the matter, if anything is."""
        if self.gone:
            raise StoreError(self.gone)
        return self.free_bytes


def test_a_data_directory_that_cannot_be_read_is_no_full_disk(
    clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = LostStore(LEAST_FREE_BYTES)
    health = StoreHealth(store, clock, LEAST_FREE_BYTES)
    said = []
    for store.gone in ("", "no such directory", "no such directory", "no permission", "", "no permission"):
        clock.pass_ns(HEAL_PAUSE_NS)
        health.check_disk()
        assert not health.is_disk_full
        assert math.isnan(health.free_bytes_if_known) == bool(store.gone)
        said.append(health.refusal())
    gone = "the queue's data directory cannot be read: no such directory; submits are refused until it can"
    assert said == ["", gone, gone, gone.replace("no such directory", "no permission"), "", said[3]]
    assert [record.getMessage() for record in caplog.records] == [
        "the queue's data directory cannot be read: no such directory",
        "the queue's data directory cannot be read: no permission",
        "the queue's data directory can be read again",
        "the queue's data directory cannot be read: no permission",
    ]


STORIES = {
    "fails": Ability.BROKEN,
    "fails fails": Ability.BROKEN,
    "fails built": Ability.BROKEN,
    "fails built mended": Ability.WRITES,
    "fails not-built": Ability.UNSURE,
    "fails not-built fails": Ability.UNSURE,
    "fails not-built not-built": Ability.UNSURE,
    "fails not-built built": Ability.BROKEN,
    "runs-out": Ability.TIGHT,
    "runs-out built": Ability.TIGHT,
    "runs-out built mended": Ability.WRITES,
    "runs-out fails": Ability.BROKEN,
    "runs-out not-built": Ability.UNSURE,
}
EVENTS = {
    "fails": Event.FAILED, "built": Event.BUILT, "not-built": Event.NOT_BUILT, "mended": Event.MENDED,
    "runs-out": Event.RUNS_OUT,
}  # fmt: skip
SERVED = {
    Ability.WRITES: [True, True, True, True],
    Ability.TIGHT: [False, True, True, True],
    Ability.BROKEN: [False, False, True, True],
    Ability.UNSURE: [False, False, False, True],
}
"""Of a tick, a cancel, a look and the end of a stream."""


@pytest.mark.parametrize(("story", "after"), STORIES.items())
def test_what_becomes_of_it(story: str, after: Ability, health: StoreHealth, store: FailedStore) -> None:
    for step in story.split():
        if step == "fails":
            health.failed(StoreError("no medium"))
        elif step == "runs-out":
            store.given_up = True
            assert health.notice_little_room()
        elif step == "mended":
            health.mended()
        else:
            health.built(step == "built")
    assert health.ability is after
    messages = (Tick(), Cancel(1, ("r",)), Inspect(1, ("r",)), BacklogClosed(1))
    assert [health.serves(message) for message in messages] == SERVED[after]
    assert bool(health.broken) == (after is not Ability.WRITES)
    assert (health.broken == NO_ROOM) == (bool(health.broken) and "fails" not in story)
    assert health.is_disk_full == (after is Ability.TIGHT)


def test_each_line_of_the_table_is_the_end_of_a_story() -> None:
    told = set()
    for story in STORIES:
        *way, event = (EVENTS[step] for step in story.split())
        before = Ability.WRITES
        for step in way:
            before = TABLE[before, step]
        told.add((before, event))
    assert told == set(TABLE)


def test_from_everywhere_it_may_be_mended() -> None:
    mendable = {Ability.WRITES}
    for _ in Ability:
        mendable |= {before for (before, _), after in TABLE.items() if after in mendable}
    assert mendable == set(Ability)


def test_what_another_writer_met_is_worse_than_little_room(health: StoreHealth, store: FailedStore) -> None:
    store.given_up = True
    assert health.notice_little_room()
    store.failed = "no medium"
    health.notice_failure()
    assert health.ability is Ability.BROKEN
    assert "no medium" in health.broken
