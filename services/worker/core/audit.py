"""The live audit of the worker: its reservations against each other, against its pool and against its engine.

Every reservation is looked at, but seldom: a worker has at most as many as the queue allows it leases and the
scheduler credits, some hundreds, which takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from services.worker.core.entry import Counters, Entry
from services.worker.core.lifecycle import IN_ENGINE, ON_OFFER, State
from services.worker.core.messages import AuditFailed, Effect, EngineReported
from services.worker.core.reservations import Reservations
from services.worker.core.sizing import Sizes, need_blocks

INTERVAL_NS = 1_000_000_000
"""Between audits: soon enough to be near the cause, and a thousandth of a core at most."""

EXCESS_REPORTS = 64
"""Engine reports in a row that must show more than was started, with no abort among them. An abort or an end is in
the stats a step or two later, so that what lasts for so many steps is not on its way but left behind."""

LEASED: Final = frozenset({State.TOKENIZING, *IN_ENGINE, State.FINISHING})
HOLDING: Final = frozenset({State.GRANTED, State.CLAIMING, *ON_OFFER, State.TOKENIZING, *IN_ENGINE})


class Auditor:
    """Runs the audits when they are due, and reports what they find as effects."""

    def __init__(self, held: Reservations, sizes: Sizes, counters: Counters, out: list[Effect]) -> None:
        """Read `held`; count in `counters` and write effects to `out`."""
        self._held = held
        self._sizes = sizes
        self._counters = counters
        self._out = out
        self._audited_ns = 0
        self._excess_reports = 0

    def tick(self, now_ns: int) -> None:
        """Check everything, if that was not done a moment ago."""
        if now_ns - self._audited_ns >= INTERVAL_NS:
            self._audited_ns = now_ns
            self._found(self.whole())

    def whole(self) -> tuple[str, ...]:
        """Check every reservation and lease now; return one sentence per violation, none if all is well."""
        return audit(self._held, self._sizes)

    def moved(self) -> None:
        """Note that something left the engine outside its own stats: what they show next may be older."""
        self._excess_reports = 0

    def reported(self, stats: EngineReported) -> None:
        """Notice an engine that goes on with what the session has forgotten."""
        has, held = stats.running + stats.waiting, self._held
        if has <= held.in_engine:
            self._excess_reports = 0
            return
        given = sum(entry.completions for entry in held.in_states(*IN_ENGINE))
        self._excess_reports = self._excess_reports + 1 if has > given else 0
        if self._excess_reports == EXCESS_REPORTS:
            self._excess_reports = 0
            self._found((f"the engine was given {given} sequences and has {has}, {EXCESS_REPORTS} steps long",))

    def _found(self, violations: tuple[str, ...]) -> None:
        if violations:
            self._counters.audit_violations += len(violations)
            self._out.append(AuditFailed(violations))


def audit(held: Reservations, sizes: Sizes) -> tuple[str, ...]:
    """Return one sentence per violation, none if all is well."""
    found = list(_totals(held, sizes))
    for key, entry in held.by_request.items():
        faults = _reservation_faults(held, sizes, key, entry)
        found += [f"reservation of {key} ({entry.state.value}) {fault}" for fault in faults]
    for key, entry in held.by_run.items():
        found += [f"lease {key} ({entry.state.value}) {fault}" for fault in _lease_faults(held, key, entry)]
    return tuple(found)


def _totals(held: Reservations, sizes: Sizes) -> Iterator[str]:
    reservations = held.by_request.values()
    granted = {entry.request_id for entry in reservations if entry.state is State.GRANTED}
    if granted != held.unclaimed.keys():
        yield f"{len(held.unclaimed)} grants wait to be claimed, {len(granted)} reservations are granted"
    claiming = sum(entry.state is State.CLAIMING for entry in reservations)
    if claiming != held.claiming:
        yield f"{held.claiming} claims are counted, {claiming} reservations are claiming"
    in_engine = sum(entry.state in IN_ENGINE for entry in reservations)
    if in_engine != held.in_engine:
        yield f"{held.in_engine} runs are counted in the engine, {in_engine} reservations are"
    blocks = sum(entry.held_blocks for entry in reservations)
    # Reservations that follow their output are booked below their peak; together they may outgrow the pool.
    if blocks > sizes.capacity_blocks and not any(entry.follows_output for entry in reservations):
        yield f"{blocks} blocks are held, the capacity is {sizes.capacity_blocks}"


def _reservation_faults(held: Reservations, sizes: Sizes, key: str, entry: Entry) -> Iterator[str]:
    if entry.request_id != key or entry.state not in HOLDING:
        yield "holds credits"
    if (entry.standing is not None) != (entry.state in ON_OFFER):
        yield f"stands for a request that is yet to come: {entry.standing is not None}"
    if entry.state in LEASED and held.by_run.get(entry.run_id) is not entry:
        yield "has no lease"
    if entry.state in IN_ENGINE:
        need = need_blocks(sizes, entry.prompt_tokens, entry.max_tokens, entry.completions)
        if entry.held_blocks > need and entry.settles:
            yield f"holds {entry.held_blocks} blocks, its peak is {need}"
        if entry.held_blocks < need and not entry.follows_output:
            yield f"holds {entry.held_blocks} blocks, it may need {need}"


def _lease_faults(held: Reservations, key: str, entry: Entry) -> Iterator[str]:
    if entry.lease is None or entry.run_id != key or entry.state not in LEASED:
        yield "is kept"
    if entry.state in HOLDING and held.by_request.get(entry.request_id) is not entry:
        yield "has no reservation"
