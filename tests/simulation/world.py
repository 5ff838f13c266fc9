"""Virtual time, one seed, and streams that delay, lose and break."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
"""Some Unix time to begin at."""


@dataclass(frozen=True)
class Options:
    """Everything a seed draws; printed first, so that a failure can be read."""

    seed: int
    workers: int
    requests: int
    batches: int
    most_delay_ns: int
    faults: int
    fault_window_ns: int
    policy: str
    cancel_share: float
    deadline_share: float
    over_long_share: float
    failing_share: float

    @classmethod
    def draw(cls, seed: int) -> Options:
        """Return the options of a seed."""
        rng = random.Random(seed)
        return cls(
            seed=seed,
            workers=rng.randint(1, 3),
            requests=rng.randint(5, 60),
            batches=rng.randint(1, 3),
            most_delay_ns=rng.choice((1, 5, 50)) * MS,
            faults=rng.choice((0, 2, 6, 15)),
            fault_window_ns=rng.choice((500, 3000)) * MS,
            policy=rng.choice(("worst-case", "tokenizer-ack", "virtual-channels", "predictive")),
            cancel_share=rng.choice((0.0, 0.1, 0.3)),
            deadline_share=rng.choice((0.0, 0.1)),
            over_long_share=rng.choice((0.0, 0.1)),
            failing_share=rng.choice((0.0, 0.1)),
        )


class World:
    """Events in order of virtual time; the only source of chance and of time in a simulation."""

    def __init__(self, seed: int, most_delay_ns: int) -> None:
        """Begin at START_NS with nothing to do."""
        self.rng = random.Random(seed)
        self.now_ns = START_NS
        self.most_delay_ns = most_delay_ns
        self.events = 0
        self.log: list[str] = []
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        """Do `action` at virtual time `when_ns`."""
        heapq.heappush(self._heap, (when_ns, next(self._order), action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do `action` after `delay_ns`."""
        self.at(self.now_ns + delay_ns, action)

    def delay_ns(self) -> int:
        """Draw the delay of one message."""
        return self.rng.randint(1, self.most_delay_ns)

    def chance(self, share: float) -> bool:
        """Return True for a `share` of calls."""
        return self.rng.random() < share

    def note(self, line: str) -> None:
        """Write a line into the transcript."""
        self.log.append(f"{(self.now_ns - START_NS) / MS:10.3f} {line}")

    def step(self) -> bool:
        """Do the next event; False if there is none."""
        if not self._heap:
            return False
        self.now_ns, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True


class Stream:
    """One bidirectional stream: ordered each way, lost from some moment on when it breaks."""

    def __init__(self, world: World, up: Callable[[Any], None], down: Callable[[Any], None]) -> None:
        """Deliver what is sent `up` and `down` to these functions."""
        self._world = world
        self._deliver = (up, down)
        self._last_ns = [world.now_ns, world.now_ns]
        self._closed = [False, False]
        self._on_close: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.broken = False

    def on_close(self, upper: Callable[[], None], lower: Callable[[], None]) -> None:
        """Tell each end, once, when the stream is over: `upper` is the server's, `lower` the client's."""
        self._on_close = (upper, lower)

    def up(self, message: Any) -> None:
        """Send from client to server."""
        self._send(0, message)

    def down(self, message: Any) -> None:
        """Send from server to client."""
        self._send(1, message)

    def _send(self, way: int, message: Any) -> None:
        if self.broken:
            return
        self._last_ns[way] = max(self._last_ns[way], self._world.now_ns + self._world.delay_ns())

        def arrive() -> None:
            if not self._closed[way]:
                self._deliver[way](message)

        self._world.at(self._last_ns[way], arrive)

    def close(self) -> None:
        """Break the stream: each end hears of it at a time of its own, and nothing arrives there afterwards."""
        if self.broken:
            return
        self.broken = True
        for way in (0, 1):
            self._world.after(self._world.delay_ns(), lambda way=way: self._end(way))  # type: ignore[misc]

    def cut(self, way: int) -> None:
        """Deliver nothing more in direction `way` and do not tell that end: it is dead itself."""
        self._closed[way] = True

    def _end(self, way: int) -> None:
        if self._closed[way]:
            return
        self._closed[way] = True
        if self._on_close is not None:
            self._on_close[way]()
