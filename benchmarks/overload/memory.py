"""Resident memory of processes over time, sampled beside whatever else is done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from benchmarks.lifecycle.processes import Child

SAMPLE_S = 1.0


class Memory:
    """Samples by process, in MiB, each with the phase it was taken in."""

    def __init__(self, children: Sequence[Child]) -> None:
        """Sample `children` until `stop`."""
        self._children = list(children)
        self._phase = ""
        self._samples: list[tuple[str, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")
        self._thread.start()

    def begin(self, phase: str) -> None:
        """Take what follows as samples of `phase`."""
        self._phase = phase
        self._sample()

    def stop(self) -> None:
        """Sample no more."""
        self._sample()
        self._over.set()
        self._thread.join()

    def report(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return start, peak and end in MiB, by phase and process."""
        phases: dict[str, list[dict[str, float]]] = {}
        for phase, sample in self._samples:
            phases.setdefault(phase, []).append(sample)
        return {phase: _summary(samples) for phase, samples in phases.items()}

    def print_series(self, every_s: float) -> None:
        """Print a line for every so many seconds."""
        for number, (phase, sample) in enumerate(self._samples):
            if number % max(round(every_s / SAMPLE_S), 1) == 0:
                line = "  ".join(f"{name} {mib:.0f}" for name, mib in sample.items())
                print(f"{number * SAMPLE_S:5.0f} s  {phase:<12} MiB: {line}", flush=True)

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            if self._phase:
                self._sample()

    def _sample(self) -> None:
        self._samples.append((self._phase, {child.name: child.memory_bytes() / 2**20 for child in self._children}))


def _summary(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    names = samples[0]
    return {
        name: {
            "start": round(samples[0][name], 1),
            "peak": round(max(sample[name] for sample in samples), 1),
            "end": round(samples[-1][name], 1),
        }
        for name in names
    }
