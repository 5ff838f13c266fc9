"""Whoever looks up what a service is told finds what the service reads, wherever it was said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import SecretStr
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli import config, run_batch, up
from penstock.cli.errors import CommandError
from penstock.cli.main import app
from penstock.config_file import SERVICES, ConfigFileError, config_path, told, variable_of
from penstock.exits import EX_CONFIG
from penstock.tls import TlsError, TlsFiles
from penstock.variables import VariableError, said
from services import config_source
from services.config_check import KINDS
from services.config_reading import SettingsRefusedError, read_settings

Say = Callable[[str, str, dict[str, str]], None]

SETTINGS = ("tls_ca", "tls_cert", "tls_key", "key", "keys", "log_level")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the environment say nothing to start with."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_CONFIG", "")  # so that it is restored, whatever sets it
    monkeypatch.delenv("PENSTOCK_CONFIG")


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return what says settings to a service: in variables, in files these name, or in tables of the file."""

    def say(where: str, service: str, values: dict[str, str]) -> None:
        if where.startswith("variable"):
            for variable, value in {variable_of(service, name): value for name, value in values.items()}.items():
                (tmp_path / variable).write_text(f"{value}\r\n")
                if where == "variable":
                    monkeypatch.setenv(variable, value)
                else:
                    monkeypatch.setenv(f"{variable}_FILE", str(tmp_path / variable))
            return
        path = tmp_path / "penstock.toml"
        table = "common" if where == "common" else service
        lines = [f'{name} = "{value}"' for name, value in values.items()]
        before = path.read_text() if path.exists() else ""
        path.write_text("\n".join([before, f"[{table}]", *lines, ""]))
        if where == "file of a variable's file":
            (tmp_path / "named").write_text(f"{path}\n")
            monkeypatch.setenv("PENSTOCK_CONFIG_FILE", str(tmp_path / "named"))
        else:
            monkeypatch.setenv("PENSTOCK_CONFIG", str(path))

    return say


def plain(value: Any) -> str:
    """Return a setting as it was written."""
    return str(value.get_secret_value() if isinstance(value, SecretStr) else value)


def test_the_variables_are_those_that_services_read() -> None:
    for service, kind in KINDS.items():
        for name in kind.model_fields:
            assert variable_of(service, name) == config_source.variable_of(kind, name)


@pytest.mark.parametrize("service", KINDS)
@pytest.mark.parametrize("where", ["variable", "variable's file", "own table", "common", "file of a variable's file"])
def test_what_is_told_is_what_the_service_reads(say: Say, where: str, service: str) -> None:
    kind = KINDS[service]
    names = [name for name in SETTINGS if name in kind.model_fields and (where != "common" or name != "keys")]
    values = {name: "debug" if name == "log_level" else f"/etc/x/{name}" for name in names}
    say(where, service, values)
    settings = read_settings(kind, []).settings
    assert {name: plain(getattr(settings, name)) for name in names} == values
    assert {name: told(service, name) for name in names} == values
    assert {name: config.told_to(service, name) for name in names} == values
    assert TlsFiles.told_to(service) == settings.tls_files
    assert told(service, "shutdown_grace_s") is None
    assert config.told_to(service, "shutdown_grace_s") == ""


def test_the_first_of_variable_own_table_and_common_counts(say: Say) -> None:
    kind = KINDS["worker"]
    for where in ("common", "own table", "variable"):
        say(where, "worker", {"log_level": {"common": "info", "own table": "warning", "variable": "error"}[where]})
        assert told("worker", "log_level") == read_settings(kind, []).settings.log_level
    assert told("worker", "log_level") == "error"
    assert told("", "log_level") == "info"


def test_a_variable_said_twice_is_refused_by_all(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say("variable", "gateway", {"tls_cert": "a", "tls_key": "b"})
    say("variable's file", "gateway", {"tls_cert": "a"})
    words = "PENSTOCK_TLS_CERT and PENSTOCK_TLS_CERT_FILE are both set; one must go"
    with pytest.raises(VariableError, match=words):
        told("gateway", "tls_cert")
    with pytest.raises(SettingsRefusedError, match=words):
        read_settings(KINDS["gateway"], [])
    with pytest.raises(TlsError, match=words):
        TlsFiles.told_to("gateway")
    with pytest.raises(TlsError, match=words):
        TlsFiles.from_environment()
    with pytest.raises(CommandError, match=words) as refused:
        up.gateway_url("127.0.0.1:7415")
    assert refused.value.status == EX_CONFIG
    monkeypatch.setenv("PENSTOCK_TLS_CERT_FILE", "")
    assert told("gateway", "tls_cert") == read_settings(KINDS["gateway"], []).settings.tls_cert == "a"


def test_what_is_wrong_with_the_file_of_a_variable_is_told_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("schlüssel".encode("latin-1"))
    for name, why in (("none", "No such file or directory"), ("latin", "not UTF-8")):
        path = tmp_path / name
        with pytest.raises(VariableError) as refused:
            said("PENSTOCK_X", {"PENSTOCK_X_FILE": str(path)})
        assert str(refused.value) == f"PENSTOCK_X_FILE: {path}: {why}"


def test_a_file_that_services_judge_is_judged_no_further(say: Say, tmp_path: Path) -> None:
    say("own table", "queue", {"tls_cert": "a", "nonsense": "b"})
    assert told("queue", "tls_cert") == "a"
    assert config_path() == str(tmp_path / "penstock.toml")
    (tmp_path / "penstock.toml").write_text("[queue\n")
    with pytest.raises(ConfigFileError, match=r"penstock\.toml:1: "):
        told("queue", "tls_cert")
    with pytest.raises(CommandError, match=r"penstock\.toml:1: ") as refused:
        config.told_to("queue", "tls_cert")
    assert refused.value.status == EX_CONFIG


# ---- what is made of it ----


def test_the_address_that_is_printed_is_the_one_that_is_served(say: Say) -> None:
    assert up.gateway_url("127.0.0.1:7415") == "http://127.0.0.1:7415"
    say("variable's file", "gateway", {"tls_cert": "c.pem", "tls_key": "k.pem"})
    assert up.gateway_url("127.0.0.1:7415") == "https://127.0.0.1:7415"
    assert "--cert c.pem --key k.pem" in up.example("https://127.0.0.1:7415", "m")


def test_commands_speak_tls_as_the_files_of_their_variables_say(say: Say) -> None:
    say("own table", "client", {"tls_ca": "of the file", "tls_cert": "c", "tls_key": "k"})
    assert TlsFiles.from_environment() == TlsFiles("of the file", "c", "k")
    say("variable's file", "queue", {"tls_ca": "ca.pem"})
    assert TlsFiles.from_environment() == TlsFiles("ca.pem"), "variables stand in the place of the table"


def test_a_configuration_file_that_a_file_names_is_everybodys(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("file of a variable's file", "client", {"queue": "q:1", "tls_ca": "ca.pem"})
    assert config.defaults_of(get_command(app))["get"] == {"queue": "q:1"}
    assert TlsFiles.from_environment().ca == "ca.pem"
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(run_batch, "_with_journal", lambda options, _: asked.append((options.queue, options.scheduler)))
    (tmp_path / "in").touch()
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    CliRunner().invoke(app, command, catch_exceptions=False)
    assert asked == [("q:1", "127.0.0.1:7420")]
    monkeypatch.setenv("PENSTOCK_CONFIG_FILE", str(tmp_path / "named"))
    config.take_config(tmp_path / "penstock.toml")
    assert config_path() == str(tmp_path / "penstock.toml"), "what the command names is in the place of both"
    monkeypatch.setenv("PENSTOCK_CONFIG_FILE", str(tmp_path / "named"))
    with pytest.raises(CommandError, match="PENSTOCK_CONFIG and PENSTOCK_CONFIG_FILE are both set"):
        CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize("where", ["variable", "variable's file", "own table"])
def test_the_note_on_keys_heeds_every_place(say: Say, where: str) -> None:
    assert up.refused_by_keys(SERVICES) == ""
    say(where, "scheduler", {"keys": "keys.toml"})
    assert "scheduler, worker, gateway will be refused without PENSTOCK_KEY" in up.refused_by_keys(SERVICES)
    assert "scheduler, worker will be refused" in up.refused_by_keys(SERVICES[:-1])
    say(where, "worker", {"key": "k"})
    said = up.refused_by_keys(SERVICES)
    if where == "own table":  # the worker's alone; a variable is all services'
        assert "scheduler, gateway will be refused" in said
        say("common", "worker", {"tls_cert": "c.pem"})
        said = up.refused_by_keys(SERVICES)
    assert said == ""


def leaves(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command that has none below it, with its words."""
    for name, below in getattr(command, "commands", {}).items():
        yield from leaves(below, *path, name)
    if not hasattr(command, "commands"):
        yield path, command


def test_every_command_that_asks_a_service_is_told_where_by_the_file(say: Say) -> None:
    """Those of a group like any other; one with `--config` reads the file for itself."""
    say("own table", "client", {"queue": "q:1", "scheduler": "s:1"})
    made = typer.Typer()
    made.add_typer(below := typer.Typer(), name="letters")
    below.command("count")(lambda queue="127.0.0.1:7410": None)
    below.command("clear")(lambda: None)
    told_of = config.defaults_of(get_command(made))
    assert told_of == {"letters": {"count": {"queue": "q:1", "scheduler": "s:1"}}}
    defaults = config.defaults_of(get_command(app))
    for path, command in leaves(get_command(app)):
        options = {parameter.name for parameter in command.params}
        found: Any = defaults
        for word in path:
            found = found.get(word, {})
        asks = bool(options & {"queue", "scheduler"}) and "config" not in options
        assert config.takes_addresses(command) is asks
        assert found == ({"queue": "q:1", "scheduler": "s:1"} if asks else {}), path
