"""Dashboard and alerts name metrics that the services have; the live half is in tests/integration/test_metrics.py."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.promql import (
    OF_KUBERNETES,
    OF_THE_TARGET,
    PAGE,
    Alert,
    alerts,
    compared,
    documented,
    panel_queries,
    selectors,
)
from tools.make_dashboard import DASHBOARD, dashboard

QUERIES = [*panel_queries(), *((alert.name, alert.query) for alert in alerts())]


def test_the_dashboard_is_what_the_list_of_panels_makes() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard(), "run python -m tools.make_dashboard"


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells
        taken |= cells


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_names_metrics_and_labels_that_are_documented(title: str, query: str) -> None:
    series = documented()
    found = selectors(query)
    assert found, f"{title} asks for nothing"
    for metric, labels in found:
        assert metric in series, f"{title}: no service has {metric}"
        known = series[metric] | OF_THE_TARGET | OF_KUBERNETES
        assert labels <= known, f"{title}: {metric} has no label {labels - known}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: Alert) -> None:
    assert alert.rule["labels"]["severity"] in ("warning", "critical")
    assert alert.rule["annotations"]["summary"]
    page, _, anchor = alert.rule["annotations"]["runbook"].partition("#")
    assert (page, anchor) == ("docs/observability.md", alert.name.lower())
    assert f"### {alert.name}\n" in PAGE.read_text()
    assert compared(alert.query), "nothing is compared"


def test_no_alert_is_documented_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (Penstock\w+)$", PAGE.read_text(), re.MULTILINE)) == {a.name for a in alerts()}


@pytest.mark.parametrize(("title", "query"), panel_queries(), ids=[title for title, _ in panel_queries()])
def test_a_number_does_not_vanish_with_one_of_its_parts(title: str, query: str) -> None:
    assert " + " not in query, f"{title}: a sum with a part that is missing is none; sum(a or b)"
