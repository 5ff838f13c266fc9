"""The queries of dashboard and alerts taken apart, and what docs/observability.md says of the metrics they name."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import promql_parser
import yaml  # type: ignore[import-untyped]

from tests.support.fleet import ROOT

OBSERVABILITY = ROOT / "deploy" / "observability"
PAGE = ROOT / "docs" / "observability.md"

RATE_WINDOW = "30s"
"""Stands for Grafana's $__rate_interval."""

OF_THE_TARGET = frozenset({"job", "instance", "service"})
"""Labels that Prometheus gives to whatever it scrapes, by deploy/observability/prometheus.yaml."""

OF_KUBERNETES = frozenset({"namespace"})
"""Labels that the Prometheus operator adds by itself."""

NOT_OURS = {
    "up": frozenset[str](),
    "process_resident_memory_bytes": frozenset[str](),
    "process_cpu_seconds_total": frozenset[str](),
    "process_open_fds": frozenset[str](),
    "process_start_time_seconds": frozenset[str](),
}
"""Metrics of Prometheus itself and of its client library."""

SUFFIXES = {"histogram": {"_bucket": {"le"}, "_sum": set[str](), "_count": set[str]()}}

ROW = re.compile(r"^\| `(penstock_\w+)` \| (\w+) \| (.+?) \|", re.MULTILINE)

COMPARISONS = frozenset({"==", "!=", ">", "<", ">=", "<="})


class Selector(NamedTuple):
    """One selector of a query: the metric, and every label that the query expects it to have."""

    metric: str
    labels: frozenset[str]


class Alert(NamedTuple):
    """One rule of alerts.yaml."""

    name: str
    query: str
    rule: dict[str, Any]


def panel_queries() -> list[tuple[str, str]]:
    """Return (panel's title, query) for each query of the dashboard, Grafana's variable filled in."""
    panels = json.loads((OBSERVABILITY / "grafana" / "penstock.json").read_text())["panels"]
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", RATE_WINDOW))
        for panel in panels
        for target in panel.get("targets", [])
    ]


def alerts() -> list[Alert]:
    """Return the alerts."""
    (group,) = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    return [Alert(rule["alert"], rule["expr"], rule) for rule in group["rules"]]


def selectors(query: str) -> list[Selector]:
    """Return the selectors of a query; raises ValueError if it cannot be parsed."""
    return _selectors(promql_parser.parse(query), frozenset())


def _selectors(node: Any, wanted: frozenset[str]) -> list[Selector]:
    """Return the selectors below `node`, whose result must have the labels `wanted`."""
    if isinstance(node, promql_parser.VectorSelector):
        return [Selector(node.name or "", wanted | {matcher.name for matcher in node.matchers.matchers})]
    return [found for child, labels in _children(node, wanted) for found in _selectors(child, labels)]


def _children(node: Any, wanted: frozenset[str]) -> list[tuple[Any, frozenset[str]]]:
    """Return what a node is computed from, each with the labels its result must have."""
    match node:
        case promql_parser.MatrixSelector():
            return [(node.vector_selector, wanted)]
        case promql_parser.AggregateExpr():
            return [(node.expr, frozenset(node.modifier.labels) if node.modifier else frozenset())]
        case promql_parser.BinaryExpr():
            return [(node.lhs, wanted), (node.rhs, frozenset())]
        case promql_parser.Call():
            return [(argument, wanted) for argument in node.args]
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            return [(node.expr, wanted)]
        case _:
            return []


def compared(query: str) -> list[str]:
    """Return the left sides of the comparisons of an alert's query: what always has a value."""
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.BinaryExpr) and str(node.op) in COMPARISONS:
            found.append(node.lhs.prettify())

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def documented() -> dict[str, frozenset[str]]:
    """Return the labels of every series that the page names, a histogram's three kinds among them."""
    found = dict(NOT_OURS)
    for name, kind, text in ROW.findall(PAGE.read_text()):
        labels = frozenset() if text == "–" else frozenset(text.split(", "))
        for suffix, more in SUFFIXES.get(kind, {"": set[str]()}).items():
            found[name + suffix] = labels | more
    return found
