"""The committer: nothing is visible before it is durable, many share a sync, and a failing disk loses nothing acked."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from unittest.mock import patch

import pytest

from services.queue.committer import (
    SHORT_ROWS,
    SHORT_WRITE_NS,
    RefusedError,
)
from services.queue.core import records
from services.queue.core.effects import Accepted, Deliver
from services.queue.core.entry import DEFAULT_TENANT, LeaseRef
from services.queue.core.machine import Machine
from services.queue.core.messages import (
    Cancel,
    Claim,
    Complete,
    Inspect,
    Message,
    NewRequest,
    RequeueDead,
    Tick,
    WorkerOpened,
)
from services.queue.items import Lookup
from services.queue.storage.health import HEAL_PAUSE_NS
from services.queue.storage.recovery import recover
from services.queue.storage.store import StoreError
from services.queue.submits.intake import submit_item
from services.queue.submits.turns import SUBMITS_AT_ONCE, SUBMITS_WRITE_NS
from tests.support.committing import WATERMARK_BYTES, Rig, committing
from tests.support.queueing import RULES, STORE_ID, meta


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with committing() as rig:
        yield rig


async def test_nothing_is_released_before_the_sync_and_what_comes_meanwhile_shares_the_next(rig: Rig) -> None:
    rig.store.may_write.clear()
    first = rig.submit()
    await asyncio.to_thread(rig.store.writing.wait, 30)
    later = [rig.submit() for _ in range(50)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.done()
    assert rig.ear.effects == []
    rig.store.may_write.set()
    await asyncio.gather(first, *later)
    assert rig.store.batches == [1, 50]
    assert sum(isinstance(effect, Accepted) for effect in rig.ear.effects) == 51


async def test_a_commit_that_hangs_ages(rig: Rig) -> None:
    assert rig.committer.commit_age_s() == 0
    rig.store.may_write.clear()
    hanging = rig.submit()
    await asyncio.to_thread(rig.store.writing.wait, 30)
    assert rig.committer.commit_age_s() < 1
    rig.clock.pass_ns(20_000_000_000)
    assert 20 <= rig.committer.commit_age_s() < 21
    rig.store.may_write.set()
    await hanging
    await rig.settled(Tick())
    assert rig.committer.commit_age_s() == 0


async def test_so_does_one_that_is_written_on_the_thread_of_the_loop(rig: Rig) -> None:
    await rig.submit()
    ages: list[float] = []

    def hang() -> None:
        rig.clock.pass_ns(20_000_000_000)
        ages.append(rig.committer.commit_age_s())

    rig.store.on_write = hang
    await rig.submit()
    assert rig.store.threads[-1] == threading.current_thread().name
    assert [20 <= age < 21 for age in ages] == [True]


async def test_so_does_a_look_into_the_store_that_hangs(rig: Rig) -> None:
    looking, may_look = threading.Event(), threading.Event()

    def look(_store: object) -> Message:
        looking.set()
        assert may_look.wait(30)
        return Tick()

    rig.committer.post(Lookup(0, look))
    await asyncio.to_thread(looking.wait, 30)
    rig.clock.pass_ns(20_000_000_000)
    assert rig.committer.commit_age_s() >= 20
    may_look.set()
    await rig.submit()


async def test_many_submits_hold_up_neither_other_messages_nor_others_submits(rig: Rig) -> None:
    def hold_the_second() -> None:
        if rig.store.batches:
            rig.store.may_write.clear()

    rig.store.on_write = hold_the_second
    many = rig.submit_from(1, 3 * SUBMITS_AT_ONCE)
    inspected = rig.committer.promise(lambda ticket: Inspect(ticket, ()))
    (one,) = rig.submit_from(2, 1)
    await asyncio.gather(inspected, one)
    assert rig.store.batches == [SUBMITS_AT_ONCE]
    rig.store.on_write = lambda: None
    rig.store.may_write.set()
    await asyncio.gather(*many)
    assert rig.store.batches == [SUBMITS_AT_ONCE, SUBMITS_AT_ONCE, SUBMITS_AT_ONCE, 1]
    names = [answer.result().acks[0][0] for answer in many]
    assert names == sorted(names), "in the order they came in"


async def test_between_two_short_commits_of_submits_others_go_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.submits.turns.SUBMITS_AT_ONCE", 1)
    await rig.submit()
    begun = len(rig.store.batches)
    answers = rig.submit_from(1, 4)
    seen = []
    for answer in answers:
        await answer
        seen.append(len(rig.store.batches) - begun)
    assert rig.store.threads[-4:] == [threading.current_thread().name] * 4
    assert seen == [1, 2, 3, 4], "each was answered before the next was written"


async def test_submits_on_a_slow_disk_share_more_of_its_syncs(rig: Rig) -> None:
    rig.store.on_write = lambda: rig.clock.pass_ns(3 * SUBMITS_WRITE_NS)
    await rig.submit()
    await asyncio.gather(*rig.submit_from(1, 4 * SUBMITS_AT_ONCE))
    assert rig.store.batches == [1, 3 * SUBMITS_AT_ONCE, SUBMITS_AT_ONCE]


async def test_a_cancel_does_not_overtake_what_was_submitted_before_it(rig: Rig) -> None:
    many = rig.submit_from(1, 3 * SUBMITS_AT_ONCE)
    cancelled = rig.committer.promise(lambda ticket: Cancel(ticket, None, (DEFAULT_TENANT, meta().batch)))
    inspected = rig.committer.promise(lambda ticket: Inspect(ticket, ()))
    later = rig.submit_from(2, 1)
    inspected.add_done_callback(lambda _: assert_waiting())
    waited: list[bool] = []

    def assert_waiting() -> None:
        waited.append(not cancelled.done())

    assert (await cancelled).cancelled >= len(many)
    assert all(answer.done() for answer in many)
    assert waited == [True], "nothing else waits for them"
    await asyncio.gather(*later)


async def test_a_cancel_of_a_batch_waits_for_no_submits_of_others(rig: Rig) -> None:
    many = rig.submit_from(1, 3 * SUBMITS_AT_ONCE)
    cancelled = rig.committer.promise(lambda ticket: Cancel(ticket, None, (DEFAULT_TENANT, "another")))
    assert (await cancelled).cancelled == 0
    assert not many[-1].done()
    await asyncio.gather(*many)


async def test_a_cancel_by_name_waits_for_no_submits(rig: Rig) -> None:
    many = rig.submit_from(1, 3 * SUBMITS_AT_ONCE)
    cancelled = rig.committer.promise(lambda ticket: Cancel(ticket, ("nobody",)))
    assert (await cancelled).not_cancelled == ("nobody",)
    assert not many[-1].done()
    await asyncio.gather(*many)


async def test_what_waits_for_its_turn_is_stored_before_the_end(rig: Rig) -> None:
    answers = rig.submit_from(1, 2 * SUBMITS_AT_ONCE + 1)
    rig.committer.stop()
    await asyncio.gather(*answers)
    assert rig.store.batches == [len(answers)], "at once: nobody is kept waiting by it any more"


async def test_short_writes_to_a_fast_disk_are_made_on_the_loops_own_thread(rig: Rig) -> None:
    async def thread(submits: int) -> str:
        await rig.submit(submits)
        return rig.store.threads[-1]

    loop = threading.current_thread().name
    assert await thread(1) != loop, "nothing is known of the disk yet"
    assert await thread(1) == loop
    rig.store.on_write = lambda: rig.clock.pass_ns(SHORT_WRITE_NS + 1)
    assert await thread(SHORT_ROWS) != loop, "a long write"
    rig.store.on_write = lambda: None
    assert await thread(1) == loop, "says nothing of short ones"
    rig.store.on_write = lambda: rig.clock.pass_ns(SHORT_WRITE_NS + 1)
    assert await thread(1) == loop, "it is slow, which is not known before"
    assert await thread(1) != loop
    rig.store.on_write = lambda: None
    assert await thread(1) != loop, "it is fast again, which is not known before"
    assert await thread(1) == loop


async def test_a_write_on_the_loops_own_thread_that_fails_is_a_failed_commit(rig: Rig) -> None:
    await rig.submit()
    await rig.submit()
    assert rig.store.threads[-1] == threading.current_thread().name
    rig.store.failure = "Input/output error"
    with pytest.raises(RefusedError, match="Input/output error"):
        await rig.submit()
    await rig.committer.ask(lambda ticket: Inspect(ticket, ()))
    assert rig.ear.resets == 1
    assert len(rig.committer.machine.book.entries) == 2


async def test_a_write_that_has_to_wait_does_so_on_the_thread_of_the_commits(rig: Rig) -> None:
    await rig.submit()
    await rig.submit()
    assert rig.store.tries == 1
    rig.store.is_stalled = True
    rig.store.may_write.clear()
    rig.store.writing.clear()
    waiting, later = rig.submit(), rig.submit()
    await asyncio.to_thread(rig.store.writing.wait, 30)
    assert rig.store.threads[-1] != threading.current_thread().name
    assert not waiting.done(), "nobody is told yet"
    rig.clock.pass_ns(SHORT_WRITE_NS + 1)
    rig.store.may_write.set()
    names = [(await answer).acks[0][0] for answer in (waiting, later)]
    assert rig.store.batches == [1, 1, 2], "once"
    found = await rig.committer.ask(lambda ticket: Inspect(ticket, tuple(names)))
    assert None not in found.views
    assert rig.store.tries == 2
    await rig.submit()
    assert rig.store.tries == 2, "the disk is slow, as far as is known"


async def test_a_letter_that_is_revived_in_the_batch_it_died_in_has_no_result(rig: Rig) -> None:
    name = (await rig.submit()).acks[0][0]
    await rig.settled(WorkerOpened(1, "w", "life-1", ()))
    for attempt in range(1, RULES.max_attempts + 1):
        await rig.settled(Claim(1, name))
        rig.committer.post(Complete(1, LeaseRef(name, attempt, attempt), None, None, None))
    revived = await rig.committer.ask(lambda ticket: RequeueDead(ticket, None))
    assert revived.requeued == 1
    assert rig.store.scan(records.READY, b"", b"", 10)
    assert not rig.store.scan(records.RESULTS, b"", b"", 10)


async def test_steps_that_write_nothing_do_not_sync(rig: Rig) -> None:
    await rig.settled(Tick())
    assert rig.store.batches == []


@pytest.mark.parametrize("error", [StoreError("Input/output error"), RuntimeError("Input/output error, unforeseen")])
async def test_a_read_that_fails_refuses_what_had_to_be_read_and_nothing_that_came_with_it(
    rig: Rig, error: Exception
) -> None:
    def fail(_store: object) -> Message:
        raise error

    name = (await rig.submit()).acks[0][0]
    await rig.settled(WorkerOpened(1, "w", "life-1", ()))
    unread = rig.committer.promise(lambda ticket: Lookup(ticket, fail))
    rig.committer.post(Claim(1, name))
    with pytest.raises(RefusedError, match="Input/output error"):
        await unread
    await rig.settled(Tick())
    assert [effect.lease.request_id for effect in rig.ear.effects if isinstance(effect, Deliver)] == [name]


async def test_a_store_that_is_not_open_refuses_a_submit_with_a_key_and_ends_nothing(rig: Rig) -> None:
    new = (NewRequest(meta(idempotency_key="k"), b"p"),)
    error = StoreError("the store is closed; it is being opened again")
    with (
        patch.object(rig.store, "may_hold", side_effect=error),
        patch.object(rig.store, "get_many", side_effect=error),
        pytest.raises(RefusedError, match="is being opened again"),
    ):
        await rig.committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, new))
    assert (await rig.committer.submit(("t", 1), 1, lambda ticket: submit_item(ticket, new))).acks[0][1]


async def test_a_failed_commit_refuses_its_submits_and_forgets_them(rig: Rig) -> None:
    kept = await rig.submit()
    rig.store.failure = "No space left on device"
    with pytest.raises(RefusedError, match="No space left on device"):
        await rig.submit()
    rig.ear.effects.clear()
    found = await rig.committer.ask(lambda ticket: Inspect(ticket, (kept.acks[0][0],)))
    assert found.views[0] is not None, "what was acked is still there to read"
    assert rig.ear.resets == 1
    assert rig.committer.health.refusal()
    with pytest.raises(RefusedError):
        await rig.submit()
    assert len(rig.committer.machine.book.entries) == 1


async def test_a_machine_that_cannot_be_built_anew_answers_nothing(rig: Rig) -> None:
    name = (await rig.submit()).acks[0][0]
    rig.store.failure = "Input/output error"
    with patch.object(rig.store, "scan", side_effect=StoreError("Input/output error")):
        with pytest.raises(RefusedError):
            await rig.committer.ask(lambda ticket: Cancel(ticket, (name,)))
        with pytest.raises(RefusedError):
            await rig.committer.ask(lambda ticket: Inspect(ticket, (name,)))
    rig.store.failure = ""
    rig.clock.time_ns += 2_000_000_000
    rig.committer.post(Tick())
    found = await rig.committer.ask(lambda ticket: Inspect(ticket, (name,)))
    assert found.views[0] is not None, "the cancel that failed has left nothing behind"


async def test_the_queue_heals_when_the_store_writes_again(rig: Rig) -> None:
    rig.store.failure = "No space left on device"
    with pytest.raises(RefusedError):
        await rig.submit()
    rig.store.failure = ""
    rig.clock.time_ns += 2_000_000_000
    await rig.settled(Tick())
    assert not rig.committer.health.broken
    answer = await rig.submit()
    assert answer.acks[0][1]
    assert rig.store.reopened == 0


async def test_a_store_that_stays_broken_with_room_on_the_disk_is_opened_again(rig: Rig) -> None:
    rig.store.failure = "Corruption"
    with pytest.raises(RefusedError):
        await rig.submit()
    rig.clock.time_ns += 2_000_000_000
    await rig.settled(Tick())
    assert rig.store.reopened == 1
    await rig.submit()


async def test_a_store_in_doubt_is_opened_again_on_a_full_disk_too(rig: Rig) -> None:
    """Nothing else ends the doubt, and what would free the disk is refused until then."""
    rig.store.failure = "a sync failed"
    rig.store.free_bytes = 0
    with pytest.raises(StoreError):
        rig.store.write([])
    await rig.settled(Tick())
    assert rig.committer.health.broken
    assert rig.store.reopened == 0
    rig.store.in_doubt = True
    rig.clock.time_ns += 2_000_000_000
    await rig.settled(Tick())
    assert (rig.store.reopened, rig.committer.health.broken) == (1, "")


async def test_a_write_of_another_that_failed_is_healed(rig: Rig) -> None:
    """Files and records are written past the committer; RocksDB takes no write then until it is opened again."""
    rig.store.failure = "Input/output error"
    with pytest.raises(StoreError):
        rig.store.write([])
    await rig.settled(Tick())
    assert (rig.store.reopened, rig.committer.health.broken) == (1, "")


async def test_the_disk_watermark_refuses_submits_only_and_ends_by_itself(rig: Rig) -> None:
    rig.store.free_bytes = WATERMARK_BYTES - 1
    with pytest.raises(RefusedError, match="999 bytes free, less than the watermark of 1000") as refusal:
        await rig.submit()
    assert refusal.value.disk_full
    await rig.committer.ask(lambda ticket: Inspect(ticket, ()))
    rig.store.free_bytes = WATERMARK_BYTES
    rig.clock.time_ns += 300_000_000
    await rig.submit()


async def test_readers_wait_while_the_inbox_is_full(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.queue.committer.MAX_INBOX", 3)
    rig.store.may_write.clear()
    answers = [rig.submit()]
    await asyncio.to_thread(rig.store.writing.wait, 30)
    answers += [rig.submit() for _ in range(3)]
    waiting = asyncio.create_task(rig.committer.room())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    rig.store.may_write.set()
    await asyncio.gather(waiting, *answers)


async def test_a_machine_that_was_replaced_is_let_go_of_without_the_collector() -> None:
    """It knows all that waits, and the collector looks at what lives long once in hours, at what is frozen never."""
    made: list[weakref.ref[Machine]] = []

    class Watched(Machine):
        """A machine of which is known whether it lives; a compiled one does not tell."""

    async with committing() as rig:

        def build() -> Machine:
            machine = Watched(STORE_ID, RULES, recover(rig.store), 1)
            made.append(weakref.ref(machine))
            return machine

        rig.committer._build = build
        await rig.submit(3)
        gc.disable()
        try:
            for _ in range(3):
                rig.store.failure = "Input/output error"
                with pytest.raises(RefusedError, match="Input/output error"):
                    await rig.submit()
                rig.store.failure = rig.store._failed = ""
                rig.clock.pass_ns(HEAL_PAUSE_NS)
                await rig.settled(Tick())
                assert not rig.committer.health.broken
            assert [machine() is rig.committer.machine for machine in made if machine() is not None] == [True]
        finally:
            gc.enable()
        assert len(made) == 6
