"""Standing grants: only out of what is free for their channel, and the request that meets one is like any other."""

from __future__ import annotations

import pytest

from services.scheduler import wire
from services.scheduler.core import messages as m
from services.scheduler.core.lifecycle import State
from services.scheduler.core.sharing.share import Share
from services.scheduler.core.snapshot import take_snapshot
from services.scheduler.core.standing import MOST_KINDS, PREFIX
from tests.support.scheduling import SECOND_NS, WINDOW_TOKENS, Rig, announced, shape

SHARES = {"a": Share(), "b": Share()}


def rig(capacity_blocks: int = 100, policy: str = "virtual-channels", seqs: int = 100, **shares: Share) -> Rig:
    """Return a rig with a worker that knows standing grants."""
    made = Rig(shares or SHARES, policy, standing_ns=2 * SECOND_NS)
    made.open("w", shape(capacity_blocks, seqs), takes_standing=True)
    return made


def standing(made: Rig) -> list[m.Grant]:
    return [grant for grant in made.grants if grant.standing is not None]


def out(made: Rig) -> set[str]:
    """Return the names of those for which credits are booked."""
    return {name for worker in made.machine.fleet for name in worker.ledger if name.startswith(PREFIX)}


def run_one(made: Rig, channel: str = "a", blocks: int = 2, **changes: object) -> None:
    """Have a request come and go, so that its kind is known."""
    (name,) = made.announce(channel, blocks, **changes)
    made.finish(next(grant for grant in made.grants if grant.request_id == name))


def use(made: Rig, request_id: str = "r", blocks: int = 2, **changes: object) -> m.Grant:
    """Have the last standing grant meet a request."""
    grant = standing(made)[-1]
    request = announced(request_id, grant.channel, blocks).replace(**changes)
    made.tell(m.GrantUsed(grant.epoch, grant.epoch, grant.request_id, request))
    return grant.replace(request_id=request_id, standing=None)


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive", "tokenizer-ack"])
def test_what_met_one_settles_releases_and_is_charged_like_any_other(policy: str) -> None:
    made = rig(policy=policy)
    run_one(made)
    grant = use(made)
    worker = made.worker("w")
    entry = made.machine.backlog.get("r")
    assert entry is not None
    assert (entry.state, entry.epoch) == (State.UNLISTED, worker.epoch)
    assert made.machine._arbiter._holds.count(worker) == 1
    made.settle(grant, 2)
    reservation = worker.ledger.reservation("r")
    assert reservation is not None
    assert (reservation.held_blocks, reservation.channel) == (2, "a")
    made.release(grant)
    assert "r" not in worker.ledger
    assert made.machine.backlog.get("r") is None
    assert made.machine.counters.standing_used == {"a": 1}
    assert made.machine.counters.grants == {"a": 2}
    made.check()


def test_one_that_comes_back_to_the_queue_waits_there_as_announced() -> None:
    made = rig()
    run_one(made)
    grant = use(made)
    made.tell(announced("r", "a", 2, attempt=2))
    made.release(grant, m.ReleaseCause.LEASE_LOST)
    assert made.granted[-1] in {"r", standing(made)[-1].request_id}
    assert "r" in made.granted


def test_a_forecast_has_the_request_and_no_longer_its_grant() -> None:
    made = rig(1000, "predictive")
    run_one(made, blocks=20, max_tokens=50)
    view = made.machine.policy._views[made.worker("w").epoch]  # type: ignore[attr-defined]
    assert [*view.flights] == [standing(made)[-1].request_id]
    before = view.forecast.peak_blocks(0.0)
    grant = use(made, blocks=20, max_tokens=50)
    assert [*view.flights] == ["r", standing(made)[-1].request_id]
    made.release(grant)
    made.release(standing(made)[-1], m.ReleaseCause.RECALLED)
    assert not view.flights
    assert view.forecast.peak_blocks(0.0) == 0 < before


def test_life_tables_hear_no_more_of_a_grant_that_was_acked_before_it_met_its_request() -> None:
    """No worker of ours says anything of one that stands; what another says is taken back when the request comes."""
    made = rig(1000, "predictive")
    run_one(made, blocks=20, max_tokens=50)
    made.settle(standing(made)[-1], 40)
    tables = made.machine.policy._lengths._tables.values()  # type: ignore[attr-defined]
    assert any(any(table.exposed) for table in tables), "it may end before it is heard of again"
    made.release(use(made, blocks=20, max_tokens=50))
    made.release(standing(made)[-1], m.ReleaseCause.RECALLED)
    assert not any(any(table.exposed) for table in tables)


def test_a_ceiling_is_no_standing_grants_either() -> None:
    made = rig(100, a=Share(ceiling_share=0.05), b=Share())
    run_one(made, "b", 2)
    assert len(standing(made)) == 1
    (name,) = made.announce("a", 3)
    assert made.granted[-1] == name
    assert all(grant.channel == "b" for grant in standing(made)), "6 more would be 9, and 5 is the ceiling"


def test_the_predicted_peak_must_leave_room_for_it() -> None:
    made = rig(1000, "predictive")
    made.announce("a", 2)
    view = made.machine.policy._views[made.worker("w").epoch]  # type: ignore[attr-defined]
    view.margin.recovering = True
    use(made)
    made.wait(20)
    made.tell(m.Tick())
    assert len(standing(made)) == 1, "after a preemption nothing is granted that need not be"
    view.margin.recovering = False
    made.wait(20)
    made.tell(m.Tick())
    assert len(standing(made)) == 2


def test_it_stands_where_the_largest_that_it_is_for_could_run() -> None:
    made = rig(2000)
    made.open("small", shape(200), takes_standing=True)
    (name,) = made.announce("b", 1900)  # w is nearly full
    run_one(made, blocks=2, max_tokens=150)
    assert standing(made) == [], "neither has four times as much to spare"
    assert name in made.granted
    made.finish(made.grants[0])
    made.wait(20)
    made.tell(m.Tick())
    assert [grant.worker_id for grant in standing(made)] == ["w"]
    other = rig(2000, "predictive")
    other.open("small", shape(200), takes_standing=True)
    run_one(other, blocks=2, max_tokens=1000)
    other.tell(m.DrainRequested("w"))
    other.release(standing(other)[-1], m.ReleaseCause.RECALLED)
    other.wait(20)
    other.tell(m.Tick())
    assert {grant.worker_id for grant in standing(other)} == {"w"}, "of 1,000 tokens small could run none"


def test_a_later_attempt_of_what_met_one_waits_for_no_earlier_run() -> None:
    made = rig()
    made.open("v", shape(100), takes_standing=True)
    run_one(made)
    held = use(made)
    made.tell(announced("r", "a", 2, attempt=2))
    again = made.grants[-1] if made.granted[-1] == "r" else made.grants[-2]
    assert again.request_id == "r"
    assert again.epoch != held.epoch


def test_what_was_granted_again_before_its_first_grant_was_heard_of_is_sorted_out_by_a_new_stream() -> None:
    made = rig()
    run_one(made)
    known = standing(made)[-1]
    made.tell(announced("r", "a", 2, attempt=1))
    assert "r" in made.worker("w").ledger
    effects = made.tell(m.GrantUsed(known.epoch, known.epoch, known.request_id, announced("r", "a", 2)))
    assert m.EndStream(known.epoch) in effects
    assert not len(made.machine.fleet)


def test_a_worker_that_cannot_offer_one_keeps_it_from_nobody_else() -> None:
    made = rig(200)
    made.open("v", shape(100), takes_standing=True)
    run_one(made)
    assert standing(made)[-1].worker_id == "w"
    made.release(standing(made)[-1], m.ReleaseCause.RECALLED)  # unasked
    assert [grant.worker_id for grant in standing(made)] == ["w", "v"]


def test_what_has_not_come_for_long_is_wanted_no_more() -> None:
    made = rig()
    run_one(made)
    for _ in range(10):
        made.release(standing(made)[-1], m.ReleaseCause.RECALLED)  # as by a worker whose queue knows no offers
        made.wait(1000)
        made.tell(m.Tick())
    assert len(standing(made)) == 2


def test_where_there_is_no_room_it_is_looked_for_no_more_often_than_every_so_often() -> None:
    made = rig(100)
    made.announce("a", 30)
    assert not standing(made)
    assert not made.machine._stand_by._standing.missing(made.now_ns), "not at every wake-up"
    made.wait(20)
    assert made.machine._stand_by._standing.missing(made.now_ns)


def test_a_kind_came_when_it_was_granted_however_long_it_waited() -> None:
    made = Rig(SHARES, standing_ns=2 * SECOND_NS)
    (name,) = made.announce("a", 2)
    made.wait(3000)
    made.open("w", shape(100), takes_standing=True)
    assert made.granted == [name, standing(made)[0].request_id]


def test_one_large_request_does_not_count_for_ever() -> None:
    made = rig(800)
    run_one(made, max_tokens=700)
    for _ in range(30):
        run_one(made, max_tokens=1)
        made.wait(20)
    assert standing(made)


def test_it_is_for_the_outputs_of_late_and_not_only_for_that_of_the_last() -> None:
    made = rig(2000)
    for asked in (48, 20, 33, 16, 25, 18):
        run_one(made, max_tokens=asked)
        made.wait(20)
        made.tell(m.Tick())
    given = standing(made)[-1].standing
    assert given is not None
    assert given.max_tokens == 64, "48 came lately, which is above 32"


def test_a_limit_that_is_a_power_of_two_is_given_as_it_is() -> None:
    made = rig(2000)
    run_one(made, max_tokens=64)
    assert [grant.standing.max_tokens for grant in standing(made) if grant.standing] == [64]


def test_an_engine_that_runs_as_many_as_it_can_has_none_standing() -> None:
    made = rig(1000, seqs=4)
    made.announce("a", 2)
    assert not standing(made), "at most a quarter of what is free, of sequences too"
    made.finish(made.grants[0])
    made.wait(20)
    made.tell(m.Tick())
    assert len(standing(made)) == 1
    run_one(made, "b")
    made.wait(20)
    made.tell(m.Tick())
    assert len(standing(made)) == 1


@pytest.mark.parametrize(("grant", "request_id"), [("a-1", "r"), (None, "standing/9")])
def test_only_a_standing_grant_becomes_a_request(grant: str | None, request_id: str) -> None:
    made = rig()
    run_one(made)
    made.announce("a", 2)
    made.grants[-1], known = made.grants[-1], standing(made)[-1]
    name = made.granted[-1] if grant else known.request_id
    before = dict.fromkeys(made.worker("w").ledger)
    made.tell(m.GrantUsed(known.epoch, known.epoch, name, announced(request_id, "a", 2)))
    assert dict.fromkeys(made.worker("w").ledger) == before
    assert made.machine.counters.unknown == {"grant_used": 1}


def test_the_channel_is_that_of_the_grant() -> None:
    made = rig()
    run_one(made)
    grant = standing(made)[-1]
    made.tell(m.GrantUsed(grant.epoch, grant.epoch, grant.request_id, announced("r", "made up", 2)))
    assert made.machine.counters.standing_used == {"a": 1}
    assert [*made.machine._roster.channels] == ["a", "b"]


def test_a_second_booking_of_one_name_goes_on_behind_the_acks_of_the_first() -> None:
    made = rig()
    (name,) = made.announce("a", 2)
    first = made.grants[0]
    made._seq = 50
    made.finish(first)
    grant = use(made, name)
    made.tell(m.CompletionAck(grant.epoch, grant.epoch, name, 51, m.ReleaseCause.COMPLETED))
    assert name in made.worker("w").ledger, "an ACK of the first booking, said again"


def test_a_recall_is_said_once_and_one_that_was_recalled_costs_no_pause() -> None:
    made = rig(10, seqs=8)
    run_one(made, blocks=1)
    grant = standing(made)[-1]
    made.announce("b", 10)
    made.tell(m.Tick())
    recalls = [effect for effect in made.effects if isinstance(effect, m.Recall)]
    assert recalls == [m.Recall(grant.epoch, grant.request_id)]
    made.release(grant, m.ReleaseCause.RECALLED)
    made.finish(made.grants[-1])
    made.wait(20)
    made.tell(m.Tick())
    assert len(standing(made)) == 2, "and not after a second, as if its worker could not offer it"


def test_many_kinds_have_turns_and_large_or_several_completions_have_none() -> None:
    made = rig(10_000)
    for number in range(6):
        run_one(made, model="" if number % 2 else "m", chat=number % 3 == 0, channel="ab"[number % 2])
    kinds = {(grant.channel, grant.standing.model, grant.standing.chat) for grant in standing(made) if grant.standing}
    assert len(kinds) == 4
    before = len(standing(made))
    run_one(made, n=2)
    assert len(standing(made)) == before


def test_what_tells_nothing_of_its_prompt_is_of_a_kind_of_its_own() -> None:
    made = rig(100_000)
    run_one(made, blocks=0, prompt_bytes=40)
    run_one(made, blocks=0)
    told = [(grant.standing.prompt_bytes, grant.booked_blocks) for grant in standing(made) if grant.standing]
    assert told == [(80, WINDOW_TOKENS - 1), (0, WINDOW_TOKENS - 1)]
    assert len(out(made)) == 2


def test_it_is_for_no_more_than_a_window_holds() -> None:
    made = rig(100_000)
    run_one(made, blocks=WINDOW_TOKENS // 2 + 1)
    (grant,) = standing(made)
    assert grant.standing is not None
    assert (grant.standing.prompt_tokens, grant.booked_blocks) == (WINDOW_TOKENS - 1, WINDOW_TOKENS - 1)


def test_it_stands_where_the_window_holds_what_others_run() -> None:
    made = rig(100_000)
    made.open("wide", m.EngineShape(95_000, 1, 3 * WINDOW_TOKENS, 100), takes_standing=True)
    for _ in range(3):
        run_one(made, blocks=WINDOW_TOKENS + 1)
    (grant,) = standing(made)
    assert grant.standing is not None
    assert (grant.worker_id, grant.standing.prompt_tokens) == ("wide", 2 * WINDOW_TOKENS + 2)


def test_one_that_finds_no_room_keeps_it_from_no_other() -> None:
    made = rig(1000)
    made.announce("b", 300)
    assert not standing(made)
    made.announce("a", 2)
    assert [grant.channel for grant in standing(made)] == ["a"]


def test_never_more_stand_than_kinds_are_wanted() -> None:
    made = rig(10_000)
    for number in range(20):
        run_one(made, model="" if number % 2 else "m", chat=number % 3 == 0, channel="ab"[number % 5 % 2])
        assert len(out(made)) <= MOST_KINDS
        for recall in [effect for effect in made.effects if isinstance(effect, m.Recall)]:
            if recall.request_id in out(made):
                grant = next(grant for grant in made.grants if grant.request_id == recall.request_id)
                made.release(grant, m.ReleaseCause.RECALLED)
    books = made.machine._stand_by._standing
    assert {given.kind for _, given in books.out()} == {wanted.kind for wanted in books._wanted}, "those that came last"


def test_one_that_stands_where_others_have_more_room_by_now_is_given_there() -> None:
    made = rig(1000)
    made.open("v", shape(1000), takes_standing=True)
    run_one(made)
    grant = standing(made)[-1]
    other = "v" if grant.worker_id == "w" else "w"
    made.tell(m.DrainRequested(other))
    made.announce("b", 498)
    made.tell(m.DrainRequested(other, undo=True), m.Tick())
    recalls = [effect for effect in made.effects if isinstance(effect, m.Recall)]
    assert not recalls, "half as much is free here, its own blocks taken with it"
    made.tell(m.DrainRequested(other))
    made.announce("b", 20)
    made.tell(m.DrainRequested(other, undo=True), m.Tick())
    made.tell(m.Tick())
    recalls = [effect for effect in made.effects if isinstance(effect, m.Recall)]
    assert recalls == [m.Recall(grant.epoch, grant.request_id)]
    made.release(grant, m.ReleaseCause.RECALLED)
    assert next(grant for grant in reversed(standing(made)) if grant.channel == "a").worker_id == other


def test_nobody_runs_what_stands_ready() -> None:
    made = rig()
    run_one(made)
    (view,) = [view for view in take_snapshot(made.machine).channels if view.channel == "a"]
    assert (view.running, view.held_blocks) == (0, 4)
    use(made)
    (view,) = [view for view in take_snapshot(made.machine).channels if view.channel == "a"]
    assert view.running == 1


def test_what_met_nobody_has_completed_nothing() -> None:
    made = rig()
    run_one(made)
    made.release(standing(made)[-1], m.ReleaseCause.RECALLED)
    assert made.machine.counters.refunds == {"completed": 1, "standing_unused": 1}
    assert wire.status(take_snapshot(made.machine), {}).completion_refunds == 1


@pytest.mark.parametrize("model", ["m", "n"])
def test_what_only_a_drained_worker_could_run_keeps_nobody_else_from_having_one(model: str) -> None:
    """It asks for more than the others have, or for a model of the drained one alone."""
    made = rig()
    made.open("drained", shape(200), model=model)
    made.tell(m.DrainRequested("drained"))
    (large,) = made.announce("a", 150, model=model)
    run_one(made, "b")
    made.wait(20)
    made.tell(m.Tick())
    assert out(made), "nobody who waits could have what stands"
    made.tell(m.DrainRequested("drained", undo=True))
    assert large in made.granted
    made.check()


def test_none_stands_for_a_line_in_which_somebody_is_set_aside() -> None:
    """The queue lets nobody pass who waits in the same line, so none would meet a request."""
    made = rig()
    made.open("drained", shape(200))
    made.tell(m.DrainRequested("drained"))
    made.announce("a", 150)
    for channel in "ab":
        run_one(made, channel)
    made.wait(20)
    made.tell(m.Tick())
    assert [grant.channel for grant in standing(made)] == ["b"]


def test_who_has_no_room_beside_what_stands_for_a_lower_tier_has_it_recalled() -> None:
    made = rig(100, front=Share(), batch=Share(tier=1))
    run_one(made, "front", 10)
    grant = standing(made)[-1]
    (large,) = made.announce("batch", 90)
    assert m.Recall(grant.epoch, grant.request_id) in made.effects
    made.release(grant, m.ReleaseCause.RECALLED)
    assert made.granted[-1] == large
