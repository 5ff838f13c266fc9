"""Which workers compete for the same requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.fleet import POOLS_REMEMBERED, Fleet
from services.scheduler.core.messages import WorkerOpened
from tests.support.scheduling import shape


def open_worker(fleet: Fleet, epoch: int, *models: str, block_size: int = 1) -> None:
    engine = shape(100).replace(block_size=block_size)
    fleet.open(WorkerOpened(epoch, f"w{epoch}", "i", models, engine))


def close_worker(fleet: Fleet, epoch: int) -> None:
    worker = fleet.get(epoch)
    assert worker is not None
    fleet.remove(worker)


def pools_of(fleet: Fleet) -> list[set[int]]:
    """Return the epochs of each pool."""
    return [{epoch for group in pool.groups for epoch in group.workers} for pool in fleet.pools]


def test_a_model_in_common_links_workers() -> None:
    fleet = Fleet(1.0)
    open_worker(fleet, 1, "a")
    open_worker(fleet, 2, "b")
    open_worker(fleet, 3, "a", block_size=2)
    assert pools_of(fleet) == [{1, 3}, {2}]
    kept = fleet.pools[0]
    open_worker(fleet, 4, "a", "b")
    assert pools_of(fleet) == [{1, 2, 3, 4}]
    assert fleet.pools == [kept]
    close_worker(fleet, 4)
    assert sorted(map(sorted, pools_of(fleet))) == [[1, 3], [2]]
    assert kept.present


def test_a_pool_without_workers_waits_for_one_that_serves_the_same() -> None:
    fleet = Fleet(1.0)
    open_worker(fleet, 1, "a", "b")
    (pool,) = fleet.pools
    close_worker(fleet, 1)
    assert (fleet.pools, pool.present, pool.may_return, fleet.pools_serving("a")) == ([], False, True, [])
    open_worker(fleet, 2, "c")
    assert fleet.pools != [pool]
    open_worker(fleet, 3, "b")
    assert fleet.pools_serving("b") == [pool]
    assert (pool.present, pool.may_return, pool.models) == (True, False, {"", "b"})


def test_of_many_pools_without_workers_the_last_are_remembered() -> None:
    fleet = Fleet(1.0)
    open_worker(fleet, 1, "first")
    (first,) = fleet.pools
    close_worker(fleet, 1)
    for epoch in range(2, POOLS_REMEMBERED + 2):
        open_worker(fleet, epoch, f"m{epoch}")
        close_worker(fleet, epoch)
    assert (first.may_return, first.models) == (False, {""})
    open_worker(fleet, 1000, "first")
    assert fleet.pools != [first]


@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True),
            st.integers(0, 9),
        ),
        max_size=20,
    )
)
def test_pools_are_what_models_link(steps: list[list[str] | int]) -> None:
    fleet, names = Fleet(1.0), dict[int, set[str]]()
    for epoch, step in enumerate(steps):
        if isinstance(step, list):
            open_worker(fleet, epoch, *step)
            names[epoch] = set(step)
        elif names:
            gone = sorted(names)[step % len(names)]
            close_worker(fleet, gone)
            del names[gone]
        expected: list[set[int]] = []
        for mine in names:
            linked = [pool for pool in expected if any(names[mine] & names[other] for other in pool)]
            expected = [pool for pool in expected if pool not in linked] + [{mine}.union(*linked)]
        assert sorted(map(sorted, pools_of(fleet))) == sorted(map(sorted, expected))
        for one, own in names.items():
            worker = fleet.get(one)
            assert worker is not None
            for name in own:
                assert fleet.pools_serving(name) == [worker.group.pool]
                assert worker.group.pool.serves(name)
        groups = list(dict.fromkeys(worker.group for worker in fleet))
        for name in "abcdef":
            serving = [group for group in groups if name in group.models]
            assert sorted(map(id, fleet.serving(name))) == sorted(map(id, serving))
            assert (name in fleet.served()) == bool(serving)
        assert sorted(map(id, fleet.serving(""))) == sorted(map(id, groups))
        assert ("" in fleet.served()) == bool(groups)
        for pool in fleet.pools:
            assert pool.models == {"", *(name for group in pool.groups for name in group.models)}
