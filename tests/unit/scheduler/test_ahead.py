"""What may be booked ahead of what is free says nothing about which worker has most room."""

from __future__ import annotations

from collections import Counter

import pytest

from services.scheduler.core.sharing.share import Share
from tests.support.scheduling import Rig, shape


@pytest.mark.parametrize("policy", ["virtual-channels", "predictive"])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_few_requests_spread_over_the_fleet(policy: str, one_by_one: bool) -> None:
    rig = Rig({"a": Share()}, policy)
    for number in range(6):
        rig.open(f"w{number}", shape(1000))
    for _ in range(6 if one_by_one else 1):
        rig.announce("a", *[5] * (1 if one_by_one else 6))
    assert Counter(grant.worker_id for grant in rig.grants) == {f"w{number}": 1 for number in range(6)}


def test_a_booked_start_does_not_count_on_what_may_be_booked_ahead() -> None:
    rig = Rig({"a": Share(), "b": Share()}, "predictive")
    rig.open("w", shape(100))
    rig.announce("a", 5)
    rig.wait(1000)
    rig.finish(rig.grants[0])  # hold times are known
    rig.announce("a", 50, 60)
    worker = rig.worker("w")
    assert worker.usable_blocks - worker.ledger.free_blocks == 6
    rig.announce("b", 5)
    saving = rig.machine._arbiter._savings.on(worker)
    assert saving is not None
    assert saving.blocks == 60
    assert saving.start_ns is not None
    assert saving.passed == {rig.granted[-1]: (5, 1)}
    assert saving.extra_blocks == 100 - 60 - 5
