"""Reads the services' metrics all through the run, and keeps what a killed life would take with it."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict

from tests.chaos.stack import Stack

EVERY_S = 1.0
TIMEOUT_S = 1.0
"""A frozen service answers nothing; the next reading is soon."""

SAMPLE = re.compile(r"^(penstock_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')

Sample = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and labels."""

Reading = dict[Sample, float]


def parse(text: str) -> Reading:
    """Return Penstock's samples of a Prometheus page by name and labels."""
    return {(name, frozenset(LABEL.findall(labels))): float(value) for name, labels, value in SAMPLE.findall(text)}


async def scrape(address: str) -> Reading:
    """Return what a metrics endpoint says now; nothing if it does not answer."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                page = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return {}
    return parse(page.decode(errors="replace"))


class Gauges:
    """The last reading of each service, and its counters over all its lives."""

    def __init__(self, stack: Stack) -> None:
        """Read the services of `stack`."""
        self._stack = stack
        self.last: dict[str, Reading] = defaultdict(dict)
        self._life: dict[str, int] = {}
        self._earlier: Counter[tuple[str, Sample]] = Counter()
        self.imbalances: list[str] = []
        """Moments at which a worker's ledger did not add up."""

    async def watch(self) -> None:
        """Read everything again and again, until cancelled."""
        while True:
            await self.read_all()
            await asyncio.sleep(EVERY_S)

    async def read_all(self) -> None:
        """Read every service now."""
        await asyncio.gather(*(self.read(name) for name in self._stack.services))

    async def read(self, name: str) -> None:
        """Read one service now; anything that is no service is left alone."""
        service = self._stack.services.get(name)
        if service is None:
            return
        life = service.lives
        found = await scrape(service.metrics_address)
        if not found or life != service.lives:
            return
        if life != self._life.get(name):
            self._life[name] = life
            for sample, value in self.last[name].items():
                if math.isfinite(value):  # a gauge may be infinite; a counter never is
                    self._earlier[name, sample] += int(value)
        self.last[name] = found
        if name == "scheduler":
            self.imbalances += imbalances(found)

    def total(self, metric: str, **labels: str) -> int:
        """Return a counter summed over services, their lives and the labels that are not given."""
        wanted = set(labels.items())
        now = sum(
            value
            for reading in self.last.values()
            for (found, has), value in reading.items()
            if found == metric and wanted <= has
        )
        before = sum(v for (_, (found, has)), v in self._earlier.items() if found == metric and wanted <= has)
        return int(now) + before

    def value(self, service: str, metric: str) -> float:
        """Return a metric of one service as last read, summed over its labels; 0 if it was not there."""
        return sum(value for (found, _), value in self.last[service].items() if found == metric)


def imbalances(reading: Reading) -> list[str]:
    """Return the workers for which free + held is not capacity + overcommitted."""
    sums: Counter[str] = Counter()
    signs = {"capacity_blocks": -1, "overcommitted_blocks": -1, "free_blocks": 1, "held_blocks": 1}
    for (name, labels), value in reading.items():
        sign = signs.get(name.removeprefix("penstock_scheduler_"))
        if sign is not None:
            sums[dict(labels)["worker"]] += sign * int(value)
    return [f"{worker}: free + held is off by {off} blocks" for worker, off in sums.items() if off]
