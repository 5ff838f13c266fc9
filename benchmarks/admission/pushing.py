"""Sides that put requests straight into an engine, each with its own idea of how many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.admission.clock import Clock
from benchmarks.admission.engine import Engine, Step
from benchmarks.admission.windows import AdaptiveWindow, LiveWindow
from benchmarks.admission.workloads import Item

Router = Callable[[Sequence[Engine]], Engine]


def round_robin() -> Router:
    """Return a router that takes engines in turn."""
    turn = 0

    def choose(engines: Sequence[Engine]) -> Engine:
        nonlocal turn
        turn += 1
        return engines[(turn - 1) % len(engines)]

    return choose


def least_requests() -> Router:
    """Return a router that takes the engine with the fewest requests inside."""
    return lambda engines: min(engines, key=lambda engine: engine.requests)


class Push:
    """Every request goes into an engine the moment it arrives."""

    def __init__(self, engines: Sequence[Engine], items: Sequence[Item], router: Router) -> None:
        """Push `items` by index."""
        self._engines, self._items, self._router = engines, items, router

    def submit(self, index: int) -> None:
        """Push one."""
        self._router(self._engines).add(str(index), self._items[index], index)


class Windowed:
    """A client that keeps at most a window of requests inside one engine; a request counts until its answer is back.

    `hop_ns` is the way from client to engine, and back.
    """

    def __init__(self, clock: Clock, engine: Engine, items: Sequence[Item], window: float, hop_ns: int) -> None:
        """Begin with an empty line."""
        self._clock, self._engine, self._items = clock, engine, items
        self.window, self._hop_ns = window, hop_ns
        self._line: deque[int] = deque()
        self._inside = 0
        engine.listen = self._stepped

    def submit(self, index: int) -> None:
        """Put one in line."""
        self._line.append(index)
        self._send()

    def _send(self) -> None:
        while self._line and self._inside < max(int(self.window), 1):
            index = self._line.popleft()
            self._inside += 1
            self._clock.after(self._hop_ns, lambda index=index: self._enter(index))  # type: ignore[misc]

    def _enter(self, index: int) -> None:
        self._engine.add(str(index), self._items[index], index)

    def _stepped(self, step: Step) -> None:
        if step.ended or self.wants(step):
            self._clock.after(self._hop_ns, lambda: self._answered(step))

    def _answered(self, step: Step) -> None:
        self._inside -= len(step.ended)
        self.adapt(step)
        self._send()

    def wants(self, step: Step) -> bool:
        """Return whether the client hears of a step in which nothing ended."""
        del step
        return False

    def adapt(self, step: Step) -> None:
        """Change the window after a step; a plain one does not."""


class Aimd(Windowed):
    """A window that adapts to the engine's preemptions."""

    def __init__(self, clock: Clock, engine: Engine, items: Sequence[Item], hop_ns: int) -> None:
        """Begin with a small window."""
        self._adaptive = AdaptiveWindow()
        super().__init__(clock, engine, items, self._adaptive.size, hop_ns)
        self._preemptions = 0

    def wants(self, step: Step) -> bool:
        """Hear of preemptions at once."""
        return step.report.preemptions > self._preemptions

    def adapt(self, step: Step) -> None:
        """Halve for a preemption, else grow."""
        preempted = step.report.preemptions > self._preemptions
        self._preemptions = max(self._preemptions, step.report.preemptions)
        self._adaptive.adapt(len(step.ended), self._inside, preempted)
        self.window = self._adaptive.size


class LivePull(Windowed):
    """A window that follows what the engine says is free after each of its steps."""

    def __init__(self, clock: Clock, engine: Engine, items: Sequence[Item], hop_ns: int) -> None:
        """Begin with the whole windows of an empty cache."""
        shape = engine.shape
        self._live = LiveWindow(shape.blocks * shape.block_size, shape.window_tokens)
        self._block_size = shape.block_size
        super().__init__(clock, engine, items, self._live.size, hop_ns)

    def wants(self, step: Step) -> bool:
        """Hear of every step."""
        del step
        return True

    def adapt(self, step: Step) -> None:
        """Follow the engine."""
        self._live.heard(step.report.running, step.report.blocks_free * self._block_size)
        self.window = self._live.size
