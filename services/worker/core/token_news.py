"""Which watched runs have tokens that their watchers have not been sent, and when they are sent."""

from __future__ import annotations

TOKEN_WAIT_NS = 5_000_000
"""Least time between two frames of tokens, unless somebody waits for a first token. A large model's step takes longer,
and then each goes out at once; one with steps of a millisecond would keep worker, queue, gateway and client busy with a
frame each for every step, which nobody can read that fast."""


class TokenNews:
    """Gathers the runs of a frame."""

    def __init__(self) -> None:
        """Nothing is to be told."""
        self._runs: dict[str, None] = {}
        self._urgent = False
        self._told_ns = -TOKEN_WAIT_NS

    def add(self, run_id: str, first: bool) -> None:
        """Note that a run has tokens; with `first` its watcher has seen none yet, and they do not wait."""
        self._runs[run_id] = None
        self._urgent = self._urgent or first

    def drop(self, run_id: str) -> None:
        """Forget a run that has ended or is watched no longer."""
        self._runs.pop(run_id, None)

    @property
    def due_ns(self) -> int | None:
        """When they are to be sent, perhaps long ago; None if there are none."""
        if not self._runs:
            return None
        return 0 if self._urgent else self._told_ns + TOKEN_WAIT_NS

    def take(self, now_ns: int) -> list[str]:
        """Return the runs to send now, in the order they were noted: all of them if it is time, else none."""
        due_ns = self.due_ns
        if due_ns is None or now_ns < due_ns:
            return []
        runs = list(self._runs)
        self._runs.clear()
        self._urgent, self._told_ns = False, now_ns
        return runs
