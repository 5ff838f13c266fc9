"""Counters and histograms with one writer: what one event loop counts, without prometheus_client's lock per sample.

A scrape reads from another thread, and may see one sample in a sum and not yet in its count; the next scrape has both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Samples:
    """The samples of one series of a histogram."""

    __slots__ = ("_edges", "counts", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        """Start empty; `edges` are upper bounds, ascending, the last one infinite."""
        self._edges = edges
        self.counts = [0] * len(edges)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one sample."""
        self.counts[bisect_left(self._edges, value)] += 1
        self.total += value


class LocalHistogram(Collector):
    """A histogram, with one series per value of `label` if it has one."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry, label: str = ""
    ) -> None:
        """Register with `registry`."""
        self._name, self._text, self._label = name, text, label
        self._edges = (*buckets, float("inf"))
        self._names = [_edge_name(edge) for edge in self._edges]
        self._series: dict[str, Samples] = {} if label else {"": Samples(self._edges)}
        registry.register(self)

    def of(self, value: str) -> Samples:
        """Return the series of one value of the label."""
        samples = self._series.get(value)
        if samples is None:
            samples = self._series[value] = Samples(self._edges)
        return samples

    def observe(self, value: float) -> None:
        """Count one sample of a histogram without a label."""
        self._series[""].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else None)
        for value, samples in list(self._series.items()):
            counts = accumulate(samples.counts)
            buckets = [(name, float(n)) for name, n in zip(self._names, counts, strict=True)]
            family.add_metric([value] if self._label else [], buckets, samples.total)
        yield family


def _edge_name(edge: float) -> str:
    return str(floatToGoString(edge))  # type: ignore[no-untyped-call]


class LocalCounter(Collector):
    """A counter without labels; `name` is without `_total`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        """Register with `registry`."""
        self._name, self._text = name, text
        self.value = 0
        registry.register(self)

    def inc(self, amount: int = 1) -> None:
        """Count."""
        self.value += amount

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)
