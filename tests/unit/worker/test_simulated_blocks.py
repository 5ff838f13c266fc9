"""The pool of blocks: what is found, and what is lost first."""

from __future__ import annotations

from services.worker.simulated.blocks import BlockPool, prompt_keys


def publish(pool: BlockPool, *keys: int) -> None:
    """Let a sequence compute and give back full blocks with these keys, first to last."""
    pool.take(len(keys))
    pool.release([pool.publish(key) for key in keys], [], 0)


def found(pool: BlockPool, *keys: int) -> int:
    return len(pool.find(keys))


def test_a_prefix_is_found_up_to_the_first_gap() -> None:
    pool = BlockPool(10)
    publish(pool, 1, 2, 4)
    assert found(pool, 1, 2, 3, 4) == 2
    assert found(pool, 3) == 0
    assert pool.free == 10


def test_claimed_blocks_are_not_free_until_the_last_holder_leaves() -> None:
    pool = BlockPool(10)
    publish(pool, 1, 2)
    first, second = pool.find([1, 2]), pool.find([1])
    pool.claim(first)
    pool.claim(second)
    assert pool.free == 8
    pool.release(first, [], 0)
    assert pool.free == 9
    pool.release(second, [], 0)
    assert pool.free == 10


def test_blocks_without_keys_go_first_then_those_idle_longest_last_block_first() -> None:
    pool = BlockPool(6)
    publish(pool, 1, 2)
    publish(pool, 3, 4)
    pool.take(2)
    assert (found(pool, 1, 2), found(pool, 3, 4)) == (2, 2)
    pool.take(1)
    assert (found(pool, 1, 2), found(pool, 3, 4)) == (1, 2)
    pool.take(2)
    assert (found(pool, 1, 2), found(pool, 3, 4)) == (0, 1)


def test_a_copy_survives_the_loss_of_its_twin() -> None:
    pool = BlockPool(2)
    pool.take(2)
    twins = [pool.publish(7), pool.publish(7)]
    pool.release(twins[:1], [], 0)
    pool.take(1)
    assert pool.find([7]) == twins[1:]


def test_keys_stand_for_the_whole_prefix() -> None:
    keys = prompt_keys(range(70), 16)
    assert len(keys) == 4
    assert prompt_keys(range(64), 16) == keys
    assert prompt_keys([9, *range(1, 64)], 16)[3] != keys[3]
