"""The Helm chart as far as it can be judged without Helm; `make helm-check` renders it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "penstock"
CASES = sorted((ROOT / "tests" / "helm" / "cases").glob("*.yaml"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize("path", [CHART / "values.yaml", *CASES], ids=lambda path: path.stem)
def test_values_are_what_the_schema_takes(path: Path) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


def test_every_value_that_the_schema_knows_has_a_default() -> None:
    def names(properties: dict[str, Any], values: dict[str, Any], path: str) -> list[str]:
        missing = []
        for name, kind in properties.items():
            if name not in values:
                missing.append(f"{path}{name}")
            elif "properties" in kind:
                missing += names(kind["properties"], values[name], f"{path}{name}.")
        return missing

    # `global` is Helm's own.
    assert names(SCHEMA["properties"], VALUES, "") == ["global"]


def test_the_chart_has_the_version_of_the_services() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version


def test_the_chart_brings_the_alerts_and_the_dashboard_of_the_repository() -> None:
    for name, there in (("alerts.yaml", "alerts.yaml"), ("dashboard.json", "grafana/penstock.json")):
        assert (CHART / "files" / name).read_bytes() == (ROOT / "deploy" / "observability" / there).read_bytes()
