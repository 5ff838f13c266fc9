"""Where engines run what is guaranteed first, it waits for nobody's completion: from the start, and whatever runs."""

from __future__ import annotations

import pytest

from benchmarks.admission.isolation import BATCH, INTERACTIVE, LOADS, Run
from services.scheduler.core import messages as m
from services.scheduler.core.channel import Share
from tests.support.scheduling import SECOND_NS, Rig, shape

STEP_MS = 20.0
"""Of the simulated engine while its cache is full: the time between two of its steps is less."""

SHARES = {"safe": Share(1.0, 0.3), "batch": Share()}


@pytest.mark.parametrize("load", LOADS)
def test_beside_any_flood_it_waits_for_some_steps_also_while_nothing_is_known(load: str) -> None:
    alone = Run("predictive", LOADS[load], 40, 0, (INTERACTIVE,)).waits().waits_ms
    beside = Run("predictive", LOADS[load], 100, 0, (INTERACTIVE, BATCH)).waits()
    for when in ("cold ", ""):
        assert beside.waits_ms[f"{when}grant p99"] <= 1.2 * alone["grant p99"] + STEP_MS
        assert beside.waits_ms[f"{when}ttft p99"] <= 1.2 * alone["ttft p99"] + 8 * STEP_MS
    assert beside.usage > 0.85


def full(policy: str = "predictive", guaranteed_first: bool = True) -> Rig:
    """Return a scheduler whose one worker has no block left."""
    rig = Rig(SHARES, policy)
    rig.open("w", shape(100), [m.Holding("long", "batch", 100, 1)], guaranteed_first=guaranteed_first)
    return rig


def test_a_guarantee_is_granted_where_nothing_is_free_and_no_more() -> None:
    rig = full()
    safe = rig.announce("safe", 8, 8, 8, 8)
    rig.announce("batch", 1)
    assert rig.granted == safe[:3]
    assert all(grant.guaranteed for grant in rig.grants)
    assert rig.worker("w").ledger.overcommitted_blocks == 24
    rig.check()
    rig.finish(rig.grants[0])
    assert rig.granted == safe, "its own end makes room within its guarantee"


def test_what_is_in_its_place_waits_until_what_it_took_has_come_home() -> None:
    rig = full()
    rig.announce("safe", 8, 8)
    (batch,) = rig.announce("batch", 10)
    rig.tell(m.CompletionAck(1, 1, "long", 2, m.ReleaseCause.COMPLETED))
    assert batch in rig.granted
    assert not rig.grants[-1].guaranteed


@pytest.mark.parametrize(("policy", "guaranteed_first"), [("predictive", False), ("virtual-channels", True)])
def test_nothing_is_booked_beyond_what_is_free_where_engines_do_not_make_room(
    policy: str, guaranteed_first: bool
) -> None:
    rig = full(policy, guaranteed_first)
    rig.announce("safe", 8)
    assert not rig.grants


@pytest.mark.parametrize("policy", ["predictive", "virtual-channels"])
def test_whoever_goes_beyond_its_guarantee_is_not_first(policy: str) -> None:
    rig = Rig(SHARES, policy)
    rig.open("w", shape(100), guaranteed_first=True)
    rig.announce("safe", 14, 14, 14)
    assert [grant.guaranteed for grant in rig.grants] == [True, True, False]
    rig.announce("batch", 14)
    assert [grant.guaranteed for grant in rig.grants[3:]] == [False]


@pytest.mark.parametrize(("share", "guaranteed"), [(0.3, True), (0.0, False)])
def test_a_standing_grant_within_a_guarantee_is_one(share: float, guaranteed: bool) -> None:
    rig = Rig({"safe": Share(1.0, share)}, "predictive", standing_ns=2 * SECOND_NS)
    rig.open("w", shape(100), takes_standing=True, guaranteed_first=True)
    rig.announce("safe", 2)
    rig.finish(rig.grants[-1])
    rig.wait(100)
    rig.tell(m.Tick())
    assert rig.grants[-1].standing is not None
    assert rig.grants[-1].guaranteed is guaranteed
