"""Write Grafana's dashboard from the list of its panels.

Usage: python -m tools.make_dashboard [--check]

With `--check` it writes nothing and fails if the dashboard in the repository is another. The list is
`tools/dashboard_panels.py`; Grafana's JSON around it is the same for every panel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.dashboard_panels import ROWS, Panel, Row

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy" / "observability" / "grafana" / "penstock.json"

GRID_COLUMNS = 24
"""Of Grafana's layout."""

STAT_HEIGHT, GRAPH_HEIGHT = 4, 8
"""In grid rows."""

SCHEMA_VERSION = 39
"""Of the dashboard JSON, as Grafana 10 and 11 write it; later ones migrate it as they load it."""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def targets_of(panel: Panel) -> list[dict[str, Any]]:
    """Return the panel's queries as Grafana has them."""
    return [
        {"datasource": SOURCE, "editorMode": "code", "expr": query, "legendFormat": legend, "refId": chr(ord("A") + i)}
        for i, (query, legend) in enumerate(panel.queries)
    ]


def panel_json(panel: Panel, number: int, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    """Return one panel."""
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}}
    if panel.stat:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        steps += [{"color": color, "value": value} for value, color in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    elif panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets_of(panel),
    }


def row_json(row: Row, number: int, y: int) -> list[dict[str, Any]]:
    """Return a row's heading and its panels, numbered on from `number`."""
    heading = {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1},
    }
    height = STAT_HEIGHT if row.panels[0].stat else GRAPH_HEIGHT
    width = GRID_COLUMNS // row.columns
    return [
        heading,
        *(
            panel_json(panel, number + i, (i - 1) % row.columns * width, y + 1 + (i - 1) // row.columns * height,
                       width, height)
            for i, panel in enumerate(row.panels, 1)
        ),
    ]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    for row in ROWS:
        y = max((panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels), default=0)
        panels += row_json(row, len(panels) + 1, y)
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}
    return {
        "uid": "penstock",
        "title": "Penstock",
        "description": "Queue, scheduler, workers and gateway of one fleet.",
        "tags": ["penstock", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source]},
        "annotations": {"list": []},
        "panels": panels,
    }


def main() -> None:
    """Write the dashboard, or compare it."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        DASHBOARD.write_text(text)
    elif DASHBOARD.read_text() != text:
        sys.exit(f"{DASHBOARD.name} is not what the list of panels makes; run python -m tools.make_dashboard")


if __name__ == "__main__":
    main()
