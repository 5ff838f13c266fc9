"""The live audit of the book: sound books pass, every kind of damage is named, and a look is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.queue.core import records
from services.queue.core.audit import ENTRIES_PER_LOOK
from services.queue.core.book import Book
from services.queue.core.effects import AuditFailed, Write
from services.queue.core.entry import DEFAULT_TENANT, Entry, Failure
from services.queue.core.lifecycle import State
from services.queue.core.messages import Cancel, Complete, Inspect, WorkerOpened
from services.queue.storage.spot_check import REQUESTS_PER_LOOK, SpotCheck, differences
from services.queue.storage.store import StoreError
from tests.support.memory_store import MemoryStore
from tests.support.queueing import Queue, meta

READY, LEASED, DEAD = 1, 2, 3


def book_with_one_of_each() -> Queue:
    """Return a queue with request 1 ready, 2 leased to worker `w` and 3 dead."""
    queue = Queue()
    names = queue.submit(*(meta(batch="b") for _ in range(3)))
    queue.step(WorkerOpened(1, "w", "life", ()))
    for _ in range(queue.rules.max_attempts):
        lease = queue.claim(1, names[2])
        assert lease is not None
        queue.step(Complete(1, lease, None, Failure("broken", "it broke"), None))
    assert queue.claim(1, names[1]) is not None
    return queue


def break_stop(book: Book) -> None:
    book.entries[LEASED].state = State.STOPPING


def break_fence(book: Book) -> None:
    book.entries[LEASED].fencing_token = book.counters.fencing_token + 1


def break_attempts(book: Book) -> None:
    book.entries[LEASED].attempts = 0


def break_log(book: Book) -> None:
    book.entries[DEAD].completion_seq = book.counters.completion_seq + 1


def break_number(book: Book) -> None:
    book.counters.seq = DEAD - 1


def lose_name(book: Book) -> None:
    del book._by_name[book.entries[READY].name]


def lose_entry(book: Book) -> None:
    del book.entries[READY]


def break_announced(book: Book) -> None:
    book.lines["batch"]._announced = 2


DAMAGE: list[tuple[Callable[[Book], object], str]] = [
    (
        lambda book: book.lines["batch"].leave(READY, book.entries[READY].meta.model),
        "request 1 (ready) is not in its line",
    ),
    (
        lambda book: book.lines["batch"].enter(LEASED, 0, book.entries[LEASED].meta.model),
        "request 2 (leased) is in its line",
    ),
    (lambda book: book.leases.pop(LEASED), "request 2 (leased) is not in the leases"),
    (lambda book: book.leases.update({READY: 9}), "request 1 (ready) is in the leases"),
    (lambda book: book.holdings["w"].discard(LEASED), "request 2 (leased) is not in its worker's leases"),
    (lambda book: book.dead.pop(DEAD), "request 3 (dead) is not in the dead letters"),
    (lambda book: book.dead.update({READY: None}), "request 1 (ready) is in the dead letters"),
    (lambda book: book.batches[DEFAULT_TENANT, "b"].discard(READY), "request 1 (ready) is not in its batch"),
    (lambda book: book.batches[DEFAULT_TENANT, "b"].add(DEAD), "request 3 (dead) is in its batch"),
    (lambda book: book.leased_by_channel.update(batch=2), "channels count {'batch': 2} leases, there are 1"),
    (lambda book: setattr(book.entries[READY], "state", State.DONE), "request 1 (done) is in the book"),
    (lambda book: setattr(book.counters, "results", -1), "-1 results are counted"),
    (break_stop, "request 2 (stopping) has the stop outcome None"),
    (break_fence, "request 2 (leased) is in attempt 1 with the fencing token 5"),
    (break_attempts, "request 2 (leased) is in attempt 0 with the fencing token 4"),
    (break_log, "request 3 (dead) has the place 2 in the completion log"),
    (break_number, "request 3 (dead) is not a number given out; the last is 2"),
    (lose_name, "request 1 (ready) is not in the names"),
    (lose_entry, "1 waiting + 1 leased + 1 dead != 2 live requests"),
    (break_announced, "channel batch: 2 announced of 1 waiting"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE, ids=[sentence for _, sentence in DAMAGE])
def test_damage_is_named(damage: Callable[[Book], object], sentence: str) -> None:
    queue = book_with_one_of_each()
    assert queue.machine.audit.whole() == ()
    damage(queue.machine.book)
    assert sentence in queue.machine.audit.whole()


def test_a_tick_reports_what_it_finds_and_a_sound_book_reports_nothing() -> None:
    queue = book_with_one_of_each()
    assert queue.tick(1) == []
    queue.machine.book.dead.pop(DEAD)
    (found,) = [effect for effect in queue.tick(1) if isinstance(effect, AuditFailed)]
    assert "request 3 (dead) is not in the dead letters" in found.violations


def test_every_request_comes_round_while_a_look_stays_bounded() -> None:
    queue = Queue()
    queue.submit(*(meta() for _ in range(3 * ENTRIES_PER_LOOK)))
    queue.tick(1)
    oldest = queue.machine.book.entries[1]
    queue.machine.book.lines["batch"].leave(oldest.seq, oldest.meta.model)
    by_look = [any("request 1 " in text for text in queue.machine.audit.look()) for _ in range(6)]
    assert by_look.count(True) == 2


def test_what_ended_during_a_round_is_passed_over() -> None:
    queue = Queue()
    queue.submit(*(meta(batch="b") for _ in range(2 * ENTRIES_PER_LOOK)))
    assert queue.machine.audit.look() == ()
    queue.step(Cancel(1, None, (DEFAULT_TENANT, "b")))
    assert queue.machine.audit.look() == ()


def differences_of(queue: Queue) -> list[str]:
    return list(differences(queue.store, list(queue.machine.book.entries.values())))


ROWS: list[tuple[str, bytes, bytes | None, str]] = [
    (records.REQUESTS, records.seq_key(READY), None, "request 1 (ready): its row in requests is missing"),
    (
        records.READY,
        records.ready_key(Entry(READY, meta())),
        b'[1,7,""]',
        "request 1 (ready): its row in ready differs",
    ),
    (records.LEASES, records.seq_key(READY), b"[1]", "request 1 (ready): its row in leases is there"),
    (records.LEASES, records.seq_key(LEASED), None, "request 2 (leased): its row in leases is missing"),
    (records.DEAD, records.seq_key(1), None, "request 3 (dead): its row in dead is missing"),
]


@pytest.mark.parametrize(("family", "key", "value", "sentence"), ROWS, ids=[row[-1] for row in ROWS])
def test_rows_that_differ_from_memory_are_named(family: str, key: bytes, value: bytes | None, sentence: str) -> None:
    queue = book_with_one_of_each()
    assert differences_of(queue) == []
    queue.store.write([Write(family, key, value)])
    assert differences_of(queue) == [sentence]


def test_spot_checks_come_round_count_and_say_nothing_of_a_disk_that_cannot_be_read() -> None:
    queue = Queue()
    queue.submit(*(meta() for _ in range(3 * REQUESTS_PER_LOOK)))
    found: list[int] = []
    spots = SpotCheck(found.append)
    queue.store.write([Write(records.REQUESTS, records.seq_key(1), None)])
    for _ in range(6):
        assert spots.look(queue.store, queue.machine.book) == Inspect(0, ())
    assert found == [1, 1]

    class Unreadable(MemoryStore):
        def get_many(self, family: str, keys: object) -> list[bytes | None]:
            raise StoreError("the disk is gone")

    assert spots.look(Unreadable(), queue.machine.book) == Inspect(0, ())
    assert found == [1, 1]
