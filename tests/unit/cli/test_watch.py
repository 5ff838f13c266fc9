"""How `penstock watch` ends."""

from __future__ import annotations

import pytest

from tests.support.fake_queue import FakeQueue, cancelled, serving
from tests.support.shell import Shell


async def test_a_watched_request_without_a_good_answer_is_told_like_one_that_is_got() -> None:
    queue = FakeQueue()
    async with serving(queue) as address:
        shell = Shell(address, queue)
        await shell.run("submit", "good")
        queue.answer = cancelled
        await shell.run("submit", "bad")
        watched = await shell.run("watch", "r-0", "r-1")
        assert (watched.status, watched.err) == (1, "penstock: without a good answer: r-1\n")
        assert ("r-0  completed" in watched.out, "r-1  cancelled" in watched.out) == (True, True)
        assert (await shell.run("get", "r-1")).status == watched.status
        assert (await shell.run("watch", "r-0")).status == 0


async def test_a_batch_of_which_nothing_is_known_is_told() -> None:
    queue = FakeQueue()
    async with serving(queue) as address:
        watched = await Shell(address, queue).run("watch", "--batch", "smus")
        assert (watched.status, watched.err) == (1, "penstock: nothing is known of the batch 'smus'\n")


@pytest.mark.parametrize("option", [["--follow"], ["--cursor", "7"]])
async def test_what_is_for_a_batch_is_refused_beside_ids(option: list[str]) -> None:
    watched = await Shell("127.0.0.1:1", FakeQueue()).run("watch", "r-0", *option)
    assert (watched.status, watched.err) == (2, f"penstock: {option[0]}: is for --batch; ids are watched whole\n")
