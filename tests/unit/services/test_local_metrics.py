"""Counters and histograms of one writer look like prometheus_client's own when scraped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.local_metrics import LocalCounter, LocalHistogram

EDGES = (0.1, 1.0, 10.0)
VALUES = (0.05, 0.1, 0.5, 1.0, 7.0, 11.0)


def scraped(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#") and "_created" not in line)


def test_a_histogram_reads_as_the_librarys_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = LocalHistogram("wait_seconds", "Text.", EDGES, ours, "channel")
    reference = Histogram("wait_seconds", "Text.", ["channel"], buckets=EDGES, registry=theirs)
    for value in VALUES:
        mine.of("batch").observe(value)
        reference.labels("batch").observe(value)
    assert scraped(ours) == scraped(theirs)


def test_a_histogram_without_a_label_is_there_before_its_first_sample() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    LocalHistogram("wait_seconds", "Text.", EDGES, ours)
    Histogram("wait_seconds", "Text.", buckets=EDGES, registry=theirs)
    assert scraped(ours) == scraped(theirs)


def test_a_counter_counts() -> None:
    registry = CollectorRegistry()
    counter = LocalCounter("tokens", "Text.", registry)
    counter.inc()
    counter.inc(4)
    assert scraped(registry) == ["tokens_total 5.0"]
