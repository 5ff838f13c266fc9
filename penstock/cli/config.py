"""`penstock config`: look at the configuration before a service does; and what the file says to commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import App
from penstock.cli.errors import CommandError
from penstock.config_file import (
    CLIENT_ADDRESSES,
    CONFIG_VARIABLE,
    ConfigFile,
    ConfigFileError,
    client_table,
    config_path,
    is_read_once,
    told,
)
from penstock.exits import EX_CONFIG
from penstock.tls import TlsError, TlsFiles
from penstock.variables import OF_FILE, VariableError

CHECKER = "services.config_check"

app = App(help="Check the configuration file; show the settings of a service.", no_args_is_help=True)


def _take_addresses(context: typer.Context, path: Path | None) -> Path | None:
    """Let the file's `[client]` say what the command's other options and their variables leave open."""
    given = context.get_parameter_source("config")
    if given is None or given.name != "COMMANDLINE":
        with _refusals_told():
            path = Path(config_path()) if config_path() else None
    if path is not None:
        context.default_map = _addresses({CONFIG_VARIABLE: str(path)})
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_VARIABLE,
        callback=_take_addresses,
        is_eager=True,  # before the options whose defaults it sets
        help="TOML file with the settings of all services.",
        readable=False,
    ),
]


@app.command("check")
def check(file: Annotated[Path, typer.Argument(help="Configuration file.", metavar="FILE", readable=False)]) -> None:
    """Check every service's settings and what they have in common. Exit status 0: good, 78: something is wrong."""
    _run("check", str(file))


@app.command("show", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help="queue, scheduler, worker or gateway.")],
) -> None:
    """Show every setting of a service and where it comes from: flag, variable, line of the file, or default.

    Flags behind the name are those of the service, --config among them.
    """
    _run("show", service, *context.args)


def _run(*arguments: str) -> None:
    # With what this command inherited: the file may be a pipe of its shell, `<(…)`.
    status = subprocess.run([sys.executable, "-m", CHECKER, *arguments], check=False, close_fds=False).returncode
    if status:
        raise typer.Exit(status)


def takes_addresses(command: Any) -> bool:
    """Whether the file of the environment has a say in options of a command, or of one below it.

    It has none in those of a command with `--config`: that is told which file, and reads the environment's itself where
    it is told of none, as that may be no good where another is named.
    """
    names = {parameter.name for parameter in command.params}
    own = names.intersection(CLIENT_ADDRESSES) and "config" not in names
    return bool(own) or any(takes_addresses(below) for below in _below(command).values())


def defaults_of(command: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return click's default map of a command, or a group with those below it: the addresses of `[client]`.

    Raises CommandError if PENSTOCK_CONFIG is no good, or names a file that is none.
    """
    return _default_map(command, _addresses(environment))


def _default_map(command: Any, addresses: dict[str, Any]) -> dict[str, Any]:
    groups = {name: _default_map(below, addresses) for name, below in _below(command).items() if takes_addresses(below)}
    return groups if _below(command) else addresses


def _below(command: Any) -> dict[str, Any]:
    """Return the commands of a group by name; of a command there are none."""
    return getattr(command, "commands", {})


def _addresses(environment: Mapping[str, str]) -> dict[str, Any]:
    with _refusals_told():
        table = client_table(environment)
    return {key: table[key] for key in CLIENT_ADDRESSES if key in table}


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Raise CommandError for what environment or file say wrongly."""
    try:
        yield
    except (ConfigFileError, VariableError, TlsError) as error:
        raise CommandError(str(error), EX_CONFIG) from None


def said_to(service: str, name: str) -> Any:
    """Return what environment or file tell `service` for the setting `name`, as they have it; None if nothing.

    Raises CommandError if they cannot be read.
    """
    with _refusals_told():
        return told(service, name)


def told_to(service: str, name: str) -> str:
    """Return what environment or file tell `service` for the setting `name` as a text, empty if that is nothing.

    Raises CommandError if they cannot be read.
    """
    found = said_to(service, name)
    return "" if found is None else str(found)


def tls_told_to(service: str) -> TlsFiles:
    """Return the TLS files that environment or file tell `service`; raises CommandError if they cannot be read."""
    with _refusals_told():
        return TlsFiles.told_to(service)


def take_config(path: Path | None, starts: bool = True) -> None:
    """Let every service that this command starts read the file, whatever the environment names.

    Raises CommandError if the file cannot be read, by each of them if it `starts` any.
    """
    if path is None:
        return
    with _refusals_told():
        ConfigFile.read(str(path))
    if starts and is_read_once(str(path)):
        raise CommandError(f"{path}: no regular file, which each of the services could read for itself", EX_CONFIG)
    os.environ[CONFIG_VARIABLE] = str(path.absolute())
    os.environ.pop(f"{CONFIG_VARIABLE}{OF_FILE}", None)
