"""Write the tables of docs/configuration.md from the settings classes, or check that they are current.

Usage: python tools/document_settings.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.config import ServiceSettings  # noqa: E402
from services.gateway.settings import GatewaySettings  # noqa: E402
from services.queue.settings import QueueSettings  # noqa: E402
from services.scheduler.settings import SchedulerSettings  # noqa: E402
from services.worker.settings import WorkerSettings  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
SERVICES: dict[str, type[ServiceSettings]] = {
    "queue": QueueSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
}


def table(kind: type[ServiceSettings]) -> str:
    """Return a Markdown table of the settings of one service."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    prefix = str(kind.model_config.get("env_prefix", ""))
    for name, field in sorted(kind.model_fields.items()):
        rows.append(
            f"| `{flag(name, field)}` | `{variable(name, field, prefix)}` | {default(field)} | {meaning(field)} |"
        )
    return "\n".join(rows)


def alias(field: FieldInfo) -> str:
    """Return the field's own name outside, empty if it has none."""
    chosen = field.validation_alias
    if isinstance(chosen, AliasChoices):
        return str(chosen.choices[0])
    return str(chosen or "")


def flag(name: str, field: FieldInfo) -> str:
    """Return the command line flag of a setting."""
    return "--" + (alias(field) or name).lower().replace("_", "-")


def variable(name: str, field: FieldInfo, prefix: str) -> str:
    """Return the environment variable of a setting."""
    return alias(field) or (prefix + name).upper()


def default(field: FieldInfo) -> str:
    """Return the default as it would be typed."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or value == "":
        return "–"
    return f"`{json.dumps(plain(value)) if isinstance(value, dict | list) else value}`"


def plain(value: Any) -> Any:
    """Return nested models as plain values."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def meaning(field: FieldInfo) -> str:
    """Return the description, safe inside a table; raises SystemExit if there is none."""
    if not field.description:
        raise SystemExit(f"a setting has no description: {field}")
    return field.description.replace("|", "\\|")


def documented(text: str) -> str:
    """Return the document with each service's table put between its markers."""
    for service, kind in SERVICES.items():
        start, end = f"<!-- settings: {service} -->", f"<!-- end: {service} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{DOCUMENT.name} lacks the markers {start} … {end}")
        text = f"{before}{start}\n{table(kind)}\n{end}{after}"
    return text


def main(check: bool) -> int:
    """Write the document, or with `check` report drift; returns the exit status."""
    current = DOCUMENT.read_text()
    wanted = documented(current)
    if check:
        if current != wanted:
            print(f"out of date: {DOCUMENT.relative_to(ROOT)} (run `make docs`)")
        return int(current != wanted)
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
