"""The garbage collector may end an iterator that was left at any call its reader's thread makes."""

from __future__ import annotations

import asyncio
import sys
import threading

from penstock.source_thread import SourceThread


async def _read(source: SourceThread[int]) -> None:
    async for _ in source.items():
        pass


def test_a_source_that_is_left_while_its_items_are_taken_hangs_nobody() -> None:
    loop = asyncio.new_event_loop()
    source = SourceThread(iter(range(100)), loop)
    left = 0

    def leave(frame: object, event: str, argument: object) -> None:
        nonlocal left
        left += 1
        source.leave()

    def reader() -> None:
        sys.setprofile(leave)
        try:
            loop.run_until_complete(_read(source))
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the reader waits for itself"
    loop.close()
    assert left > 0
