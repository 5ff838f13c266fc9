"""Which watched runs have tokens that their watchers have not been sent, and when they are sent."""

from __future__ import annotations

TOKEN_WAIT_NS = 5_000_000
"""Longest that tokens wait, counted from the frame before: a large model's step takes longer, and what it brings mostly
goes out at once. Steps of a millisecond or two would keep worker, queue, gateway and client busy with a frame each,
which nobody can read that fast. Nothing waits while somebody waits for a first token, or once a run has ended."""


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
        if not self._runs:
            self._urgent = False

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
