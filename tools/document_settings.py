"""Write the tables of docs/configuration.md and deploy/penstock.toml from the settings classes, or check them.

Usage: python tools/document_settings.py [--check]
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from services.config import COMMON, ChannelSettings, GrpcSettings, ServiceSettings, default_channels  # noqa: E402
from services.config_source import flag_of  # noqa: E402
from services.gateway.settings import GatewaySettings  # noqa: E402
from services.queue.settings import QueueSettings  # noqa: E402
from services.scheduler.settings import SchedulerSettings  # noqa: E402
from services.worker.settings import WorkerSettings  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
EXAMPLE = ROOT / "deploy" / "penstock.toml"
WIDTH = 118
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
        rows.append(f"| `{flag_of(name)}` | `{variable(name, field, prefix)}` | {default(field)} | {meaning(field)} |")
    return "\n".join(rows)


def alias(field: FieldInfo) -> str:
    """Return the field's own name outside, empty if it has none."""
    chosen = field.validation_alias
    if isinstance(chosen, AliasChoices):
        return str(chosen.choices[0])
    return str(chosen or "")


def variable(name: str, field: FieldInfo, prefix: str) -> str:
    """Return the environment variable of a setting."""
    return alias(field) or (prefix + name).upper()


def default(field: FieldInfo) -> str:
    """Return the default as it would be typed."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or not str(value):
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


HEAD = """\
# Settings of all services, each with its default. Whatever is commented out is as if it were not here.
#
# Every service reads it: --config penstock.toml, or PENSTOCK_CONFIG=/path/penstock.toml. A variable overrides the file,
# a flag overrides both. `penstock config check penstock.toml` looks at it, `penstock config show queue` says what the
# queue makes of it.
# Queue and scheduler take up changed channels while they run; everything else waits for the next start.
# docs/configuration.md says more. `make docs` writes this file.
"""

CLIENT = """
# What commands (`penstock status`, ...) use; without tls_... here they use those of [common].
[client]
# queue = "127.0.0.1:7410"
# scheduler = "127.0.0.1:7420"
# tls_ca = ""
# tls_cert = ""
# tls_key = ""
"""


ENGINE = """
# Arguments of the engine, as vLLM names them.
[worker.engine_arguments]
# max-model-len = 4096
# gpu-memory-utilization = 0.9
# enforce-eager = true
"""


def example() -> str:
    """Return the annotated configuration file: every setting, commented out at its default."""
    parts = [HEAD]
    fields = GrpcSettings.model_fields
    parts.append("\n# For every service; its own table may say these as well, and wins.\n[common]\n")
    parts += [entry(name, field) for name, field in sorted(fields.items()) if name in COMMON]
    parts.append("\n# The virtual channels, for queue and scheduler alike.\n")
    for name, field in ChannelSettings.model_fields.items():
        parts.append(comment(f"{name}: {meaning(field)}"))
    for name, channel in default_channels().items():
        parts.append(f"\n[[channels]]\nname = {toml(name)}\n")
        parts += [f"{key} = {toml(value)}\n" for key, value in channel.model_dump().items()]
    for service, kind in SERVICES.items():
        own = {name: field for name, field in kind.model_fields.items() if name not in {*COMMON, "channels", "config"}}
        parts.append(f"\n[{service}]\n")
        parts += [entry(name, field) for name, field in sorted(own.items()) if name != "engine_arguments"]
        if service == "worker":
            parts.append(ENGINE)
    return "".join(parts) + CLIENT


def entry(name: str, field: FieldInfo) -> str:
    """Return a setting of the file: what it means, and its default commented out."""
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"{comment(meaning(field))}# {name} = {toml(value)}\n"


def comment(text: str) -> str:
    """Return text as comment lines."""
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ") + "\n"


def toml(value: Any) -> str:
    """Return a value as TOML has it; what is not set is an empty string there."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps("" if value is None else str(value))


def main(check: bool) -> int:
    """Write both files, or with `check` report drift; returns the exit status."""
    drifted = 0
    for path, wanted in ((DOCUMENT, documented(DOCUMENT.read_text())), (EXAMPLE, example())):
        current = path.read_text() if path.exists() else ""
        if current == wanted:
            continue
        if check:
            print(f"out of date: {path.relative_to(ROOT)} (run `make docs`)")
            drifted = 1
        else:
            path.write_text(wanted)
    return drifted


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
