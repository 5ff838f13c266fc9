"""What a recorder wrote, as the figures of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.admission.meter import Life, Meter

FILE = "PENSTOCK_BENCH_TRACE"
"""Environment variable that names the recorder's file."""


class Trace:
    """Reads a recorder's file as it grows, run by run."""

    def __init__(self, path: Path) -> None:
        """Begin at the start of the file."""
        self.path = path
        self._offset = 0

    def skip(self) -> None:
        """Pass over everything that has been written."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def meter(self, arrived_ns: Sequence[int], blocks: int) -> Meter:
        """Return the figures of a run, all of whose steps were written since the last call.

        `arrived_ns` has the moment each request arrived, `blocks` the engine's usable ones.
        """
        with self.path.open() as file:
            file.seek(self._offset)
            steps = [json.loads(line) for line in file]
            self._offset = file.tell()
        meter = Meter([Life(arrived) for arrived in arrived_ns])
        order = sorted(arrived_ns)
        arrived, last_ns, held = 0, order[0], 0
        for step in steps:
            while arrived < len(order) and order[arrived] <= step["scheduled_ns"]:
                arrived += 1
            backlog = arrived - meter.finished > step["running"]
            meter.held(held, blocks, max(step["scheduled_ns"] - last_ns, 0), backlog)
            # With asynchronous scheduling a step is scheduled before the one before it has ended.
            began_ns = max(step["scheduled_ns"], last_ns)
            meter.held(step["held"], blocks, step["updated_ns"] - began_ns, backlog)
            meter.left(held, blocks, step["updated_ns"] - last_ns, backlog)
            meter.samples.append((step["scheduled_ns"] - order[0], 0, step["held"] / blocks, backlog))
            _take(meter, step)
            last_ns, held = step["updated_ns"], step["held_after"]
        return meter


def _take(meter: Meter, step: dict[str, Any]) -> None:
    """Add what a step did to the requests."""
    meter.preemptions += step["preempted"]
    meter.computed_tokens += step["computed"]
    for index in step["entered"]:
        meter.lives[index].entered_ns = step["scheduled_ns"]
    for index, count, ended in step["tokens"]:
        life = meter.lives[index]
        for _ in range(count):
            meter.token(life, step["updated_ns"])
        if ended:
            meter.done(life, step["updated_ns"])
