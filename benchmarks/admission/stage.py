"""One simulated engine behind Penstock, with channels, and requests that come whenever somebody asks."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.admission.clock import SECOND_NS, Clock
from benchmarks.admission.engine import Engine
from benchmarks.admission.meter import Life, Meter
from benchmarks.admission.penstock_side import Penstock
from benchmarks.admission.sim import HOP_NS
from benchmarks.admission.workloads import Item, Shape
from services.scheduler.core.sharing.share import Share
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK
from services.worker.simulated.profile import PROFILES

PROFILE = "h100-llama-8b"


class Stage:
    """Requests by number, in virtual time. Llama 3.1 8B on an H100, a window of 8,192, and the blocks asked for."""

    def __init__(self, policy: str, shares: Mapping[str, Share], blocks: int) -> None:
        """Open a worker with so many blocks of 16 tokens."""
        self.clock, self.items = Clock(), list[Item]()
        self.meter = Meter([])
        shape = Shape(8192, 16, blocks, 1024, 2048, PROFILE, PROFILES[PROFILE])
        self.engine = Engine(self.clock, self.meter, shape, 0, ENGINE_WATERMARK, ENGINE_SCHEDULING)
        self.penstock = Penstock(self.clock, [self.engine], self.items, policy, HOP_NS, shares)

    def ask(self, channel: str, prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
        """Submit a request now; return its number."""
        self.items.append(Item(prompt_tokens, output_tokens, max_tokens, channel=channel))
        self.meter.lives.append(Life())
        number = len(self.items) - 1
        self.meter.arrived(number, self.clock.now_ns)
        self.penstock.submit(number)
        return number

    def run_until(self, seconds: float) -> None:
        """Let time pass to so many seconds after the start."""
        reached = False

        def reach() -> None:
            nonlocal reached
            reached = True

        self.clock.at(int(seconds * SECOND_NS), reach)
        while not reached:
            self.clock.step()

    def of(self, channel: str, from_ns: int = 0, to_ns: int | None = None) -> list[int]:
        """Return the channel's requests that came in a stretch of time."""
        to_ns = self.clock.now_ns if to_ns is None else to_ns
        lives, items = self.meter.lives, self.items
        return [n for n, item in enumerate(items) if item.channel == channel and from_ns <= lives[n].arrived_ns < to_ns]

    def grant_wait_ns(self, number: int) -> int:
        """Return how long a request waited for its grant, or has waited if it has none."""
        return self.penstock.granted_ns.get(number, self.clock.now_ns) - self.meter.lives[number].arrived_ns

    def first_token_ns(self, number: int) -> int:
        """Return how long a request waited for its first token, or has waited if it has none."""
        life = self.meter.lives[number]
        return (life.first_ns if life.first_ns >= 0 else self.clock.now_ns) - life.arrived_ns
