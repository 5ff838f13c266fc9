"""A service's command line: its flags under their documented names, and what is wrong with them, a line each."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from services.config_source import Record, flag_of, key_of

_NUMBER = re.compile(r"-[0-9.]+")
"""What argparse takes for a value though it begins as a flag does."""

ALIKE = 0.7
"""How near a flag must be to be meant: each begins with two dashes, which count."""

_OF_FLAG = re.compile(r"argument (?:-h/)?(--[^\s:]+): (.*)", re.DOTALL)
"""What argparse says of one flag."""


class FlagsError(SettingsError):
    """The command line cannot be taken apart."""


class FlagParser(argparse.ArgumentParser):
    """Parser of a service's flags that leaves it to others to say what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Raise FlagsError."""
        found = _OF_FLAG.fullmatch(message)
        raise FlagsError(f"{found[1]}: {found[2]}" if found else message)


def flags_of(kind: type[BaseSettings], record: Record) -> CliSettingsSource[Any]:
    """Return the source of what the command line says. Flags that are none go into the record, as names in a file do.

    It raises FlagsError for what cannot be taken apart, and SystemExit(0) for --help.
    """

    def parse(parser: FlagParser, arguments: Sequence[str]) -> argparse.Namespace:
        found, others = parser.parse_known_args(arguments)
        record.unknown += _unknown(kind, others)
        return found

    def add(parser: FlagParser, *_: str, **rest: Any) -> None:
        flag = documented[rest["dest"]]
        parser.add_argument(flag, **rest)
        if flag in after_variables:
            parser.add_argument(after_variables[flag], **rest | {"help": argparse.SUPPRESS})

    documented = {key_of(kind, name): flag_of(name) for name in kind.model_fields}
    after_variables = flags_of_variables(kind)
    parser = FlagParser(prog=str(kind.model_config.get("cli_prog_name")), description=kind.__doc__, allow_abbrev=False)
    return CliSettingsSource(kind, root_parser=parser, parse_args_method=parse, add_argument_method=add)


def flags_of_variables(kind: type[BaseSettings]) -> dict[str, str]:
    """Return, by the documented flag, the one that is named after the variable if that is named alike for all services.

    Both work.
    """
    aliases = {name: field.validation_alias for name, field in kind.model_fields.items()}
    return {flag_of(name): flag_of(alias.lower()) for name, alias in aliases.items() if isinstance(alias, str)}


def spelled_out(kind: type[BaseSettings], arguments: list[str]) -> list[str]:
    """Return `arguments` with `--name` and `--no-name` of true-or-false settings as `--name=true`, `--name=false`."""
    switches = set(_switches(kind))
    switches |= {flag for name, flag in flags_of_variables(kind).items() if name in switches}
    found = []
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        if argument in switches and following.startswith("-"):
            found.append(f"{argument}=true")
        elif argument.startswith("--no-") and f"--{argument[5:]}" in switches:
            found.append(f"--{argument[5:]}=false")
        else:
            found.append(argument)
    return found


def _switches(kind: type[BaseSettings]) -> list[str]:
    return [flag_of(name) for name, field in kind.model_fields.items() if field.annotation is bool]


def _unknown(kind: type[BaseSettings], arguments: list[str]) -> list[str]:
    """Return what is wrong with arguments that are no flags of a service; those behind a flag are its values."""
    known = [flag_of(name) for name in kind.model_fields]
    wanted = [*known, "--help", *(f"--no-{flag[2:]}" for flag in _switches(kind))]
    lines: list[str] = []
    for argument in arguments:
        if argument == "--":
            continue
        if not argument.startswith("-") or _NUMBER.fullmatch(argument):
            if not lines:
                lines.append(f"unexpected argument {argument!r}")
            continue
        flag = argument.partition("=")[0]
        near = get_close_matches(flag_of(flag.lower().lstrip("-").removeprefix("penstock-")), wanted, 1, ALIKE)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        lines.append(f"{flag}: unknown; {hint}")
    return lines
