"""Where a service's settings come from besides its command line: the environment, and the configuration file.

Each source gives way to the ones before it, whole settings at a time: channels of the environment are not mixed with
channels of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsError

from penstock.config_file import CONFIG_VARIABLE, ConfigFile, ConfigFileError, Path, dotted
from penstock.variables import OF_FILE, VariableError, said

DEFAULT, FLAG = "default", "flag"

LINKED = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Ends of the variables that Kubernetes makes in every container for a Service, of the name `penstock-queue` say."""

COMPOSED = {
    "PENSTOCK_WORKER_FLAGS": "flags on the command line",
    "PENSTOCK_WORKER_ID": "PENSTOCK_WORKER_WORKER_ID",
    "PENSTOCK_GATEWAY_CLIENT_AUTH": "PENSTOCK_TLS_CLIENT_AUTH",
}
"""Variables of `deploy/compose*.yaml`, set where `docker compose` runs, and what does the same to a service that is
started there too: it passes them over, and says so."""


@dataclass
class Record:
    """Which source each setting came from, for messages: by the name a source gives it."""

    file: ConfigFile | None = None
    in_file: dict[str, Path] = field(default_factory=dict)
    """Path in the file of each setting that was taken from it."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variable of each setting that the environment names; a flag may have come before it."""
    flags: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    """What is to be said of names that are no setting, and of channels without a name of their own; the others are read
    all the same."""
    passed_over: list[str] = field(default_factory=list)
    """What is to be said of variables that are Compose's."""
    channels: dict[str, Path] = field(default_factory=dict)
    """Path in the file of each channel, by the name under which its settings are judged."""
    misnamed: bool = False
    """Whether the file leaves open which channels there are: what is said of all of them together means nothing."""

    def origin(self, key: str) -> str:
        """Return where the setting came from, for people."""
        if key in self.flags:
            return FLAG
        if key in self.variables:
            return self.variables[key]
        if key in self.in_file and self.file is not None:
            return self.file.place(self.in_file[key])
        return DEFAULT

    def misname(self, wrong: ConfigFileError) -> None:
        """Note what is wrong with the name of a channel, or with where channels stand."""
        self.unknown.append(str(wrong))
        self.misnamed = True


_record: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recording() -> Iterator[Record]:
    """Note where the settings that are read meanwhile come from."""
    record = Record()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def key_of(kind: type[BaseSettings], name: str) -> str:
    """Return the name by which sources give a field: its alias if it has one."""
    alias = kind.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else name


def variable_of(kind: type[BaseSettings], name: str) -> str:
    """Return the environment variable of a field."""
    alias = kind.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{kind.model_config.get('env_prefix', '')}{name}".upper()


def flag_of(name: str) -> str:
    """Return the documented flag of a field."""
    return f"--{name.replace('_', '-')}"


def table_of(kind: type[BaseSettings]) -> str:
    """Return the table of the file that a service reads."""
    return str(kind.model_config.get("env_prefix", "")).removeprefix("PENSTOCK_").strip("_").lower()


class Environment(EnvSettingsSource):
    """Variables, or the files that they name."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the value of a field's variable; raises SettingsError if it is set twice, or its file is no good."""
        _, key, is_complex = super().get_field_value(field, field_name)
        variable = variable_of(self.settings_cls, field_name)
        # pydantic has the names in small letters, whichever they are set in.
        names = [name for name in (variable, f"{variable}{OF_FILE}") if self.env_vars.get(name.lower()) is not None]
        try:
            found = said(variable, {name: str(self.env_vars[name.lower()]) for name in names})
        except VariableError as error:
            raise SettingsError(str(error)) from None
        if found is None:
            return None, key, is_complex
        record = _record.get()
        if record is not None:
            record.variables[key_of(self.settings_cls, field_name)] = found.by
        return found.text, key, is_complex

    def __call__(self) -> dict[str, Any]:
        """Return what no flag gave. Variables of this service that are none go into the record as in the file.

        Raises SettingsError if there is no record, a line for each, and for what cannot be read.
        """
        unknown = self._unknown()
        record = _record.get()
        if record is not None:
            record.unknown += unknown
            record.passed_over += self._passed_over()
            record.flags |= set(self.current_state)
        elif unknown:
            raise SettingsError("\n".join(unknown))
        return {key: value for key, value in super().__call__().items() if key not in self.current_state}

    def _passed_over(self) -> list[str]:
        """Return what is to be said of Compose's variables that begin as this service's do and say something."""
        prefix = str(self.settings_cls.model_config.get("env_prefix", "")).upper()
        return [
            f"note: {name} is for Compose alone; here it is {instead}"
            for name, instead in COMPOSED.items()
            if prefix and name.startswith(prefix) and self.env_vars.get(name.lower())
        ]

    def _unknown(self) -> list[str]:
        """Return what is wrong with variables that begin as this service's do and are no setting of it."""
        prefix = str(self.settings_cls.model_config.get("env_prefix", "")).upper()
        if not prefix:
            return []
        known = {variable_of(self.settings_cls, name) for name in self.settings_cls.model_fields}
        # By what is left of them without the service's name, or without ours if they are named alike for all services.
        short = {name.removeprefix("PENSTOCK_"): name for name in known} | {
            name.removeprefix(prefix): name for name in known if name.startswith(prefix)
        }
        wrong = []
        for name in sorted(variable.upper() for variable in self.env_vars):
            setting = name if name in known else name.removesuffix(OF_FILE)
            if not name.startswith(prefix) or setting in known or name in COMPOSED or LINKED.search(name):
                continue
            near = get_close_matches(setting.removeprefix(prefix), short, 1)
            hint = f"did you mean {short[near[0]]}?" if near else f"known: {', '.join(sorted(known))}"
            wrong.append(f"{name}: unknown; {hint}")
        return wrong


class TomlFile(PydanticBaseSettingsSource):
    """A service's table of the configuration file, `[common]`, and the channels."""

    def __init__(self, kind: type[BaseSettings], common: frozenset[str]) -> None:
        """Read for `kind`; the settings named `common` may stand in `[common]`, also those that it does not have."""
        super().__init__(kind)
        self._common = common

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return nothing: the file is read as a whole."""
        del field, field_name
        return None, "", False

    def __call__(self) -> dict[str, Any]:
        """Return what neither flag nor environment gave; raises ConfigFileError.

        Unknown names go into the record, if there is one, so that all that is wrong is told at once.
        """
        path = self.current_state.get(CONFIG_VARIABLE)
        if not path:
            return {}
        recorded = _record.get()
        record = recorded or Record()
        record.file = file = ConfigFile.read(path, record.unknown)
        paths = {**self._of_common(file, record), **self._of_table(file, record)}
        values: dict[str, Any] = {}
        for name, where in paths.items():
            values[key_of(self.settings_cls, name)] = file.content[str(where[0])][where[1]]
        if "channels" in self.settings_cls.model_fields and "channels" in file.content:
            paths["channels"] = ("channels",)
            values[key_of(self.settings_cls, "channels")] = channels_of(file, record)
        values = {key: value for key, value in values.items() if key not in self.current_state}
        if recorded is None and record.unknown:
            raise ConfigFileError("\n".join(record.unknown))
        by_key = {key_of(self.settings_cls, name): path for name, path in paths.items()}
        record.in_file |= {key: by_key[key] for key in values}
        return values

    def _of_common(self, file: ConfigFile, record: Record) -> dict[str, Path]:
        found = _known(file, "common", sorted(self._common), record) if file.table("common") else {}
        return {name: path for name, path in found.items() if name in self.settings_cls.model_fields}

    def _of_table(self, file: ConfigFile, record: Record) -> dict[str, Path]:
        table = table_of(self.settings_cls)
        keys = file.table(table) if table in file.content else {}
        if keys.pop("channels", None) is not None:
            record.misname(file.error((table, "channels"), "write [[channels]]: queue and scheduler share them"))
        known = [name for name in self.settings_cls.model_fields if name not in ("channels", "config")]
        return _known(file, table, known, record) if keys else {}


def channels_of(file: ConfigFile, record: Record) -> dict[str, Any]:
    """Return `[[channels]]` by name; one without a name of its own is recorded, and stands under its place."""
    listed = file.content["channels"]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        record.misname(file.error(("channels",), "write [[channels]] before each channel"))
        return {}
    channels: dict[str, Any] = {}
    for index, entry in enumerate(listed):
        path: Path = ("channels", index)
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            record.misname(file.error(path, "a channel needs a name"))
            name = dotted(path)
        elif name in channels:
            record.misname(file.error((*path, "name"), f"there is a channel {name!r} already"))
            name = dotted(path)
        channels[name] = {key: value for key, value in entry.items() if key != "name"}
        record.channels[name] = path
    return channels


def _known(file: ConfigFile, table: str, known: list[str], record: Record) -> dict[str, Path]:
    """Return where the keys of a table stand that are `known`, and record what is to be said of the others."""
    record.unknown += [str(error) for error in file.refuse_unknown((table,), known)]
    return {name: (table, name) for name in file.table(table) if name in known}
