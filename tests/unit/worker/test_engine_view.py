"""What the scheduler is told of an engine between its steps."""

from __future__ import annotations

from services.worker.core.engine_view import EngineView
from services.worker.core.messages import EngineReported


def test_nobody_is_said_to_share_what_may_have_been_of_those_that_left_outside_a_step() -> None:
    view = EngineView(100)
    view.reported(EngineReported(40, 3, 0, 0, 1_000_000, 0.6, blocks_shared=30), 1)
    told = view.report(1, 2)
    assert (told.blocks_free, told.blocks_shared) == (40, 30)
    view.freed_outside_step()
    assert view.changed
    told = view.report(1, 3)
    assert (told.blocks_free, told.blocks_shared) == (None, 0)
    view.reported(EngineReported(60, 2, 0, 0, 1_000_000, 0.4, blocks_shared=10), 4)
    told = view.report(1, 5)
    assert (told.blocks_free, told.blocks_shared) == (60, 10)
    view.emptied(6)
    assert view.report(1, 7).blocks_shared == 0
