"""Reads a service's settings from all their sources, and words what is wrong with them: a line each, with its place."""

from __future__ import annotations

import re
import sys
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_settings import CliApp, SettingsError

from penstock.config_file import ConfigFileError, ConfigUnreadableError, Path, unknown
from penstock.exits import EX_CONFIG
from penstock.tracing_variables import TracingError, check_variables
from services.config import ChannelSettings, ServiceSettings
from services.config_flags import FlagsError, flags_of, spelled_out
from services.config_source import DEFAULT, Environment, Record, flag_of, key_of, recording, table_of, variable_of
from services.quoting import shown

S = TypeVar("S", bound=ServiceSettings)


class Loaded(NamedTuple, Generic[S]):
    """Settings, and where each of them came from."""

    settings: S
    record: Record


class SettingsRefusedError(Exception):
    """Settings are wrong. `lines` say which and why.

    `unread` tells that the file could not even be read: it may be good.
    """

    def __init__(self, lines: list[str], unread: bool = False) -> None:
        """Keep what is to be said."""
        super().__init__("\n".join(lines))
        self.lines = lines
        self.unread = unread


def load_settings(kind: type[S], program: str, arguments: list[str] | None = None) -> S:
    """Read settings of `kind` from command line, environment and file.

    Prints one line per wrong setting and raises SystemExit(78) if any is wrong.
    """
    return load_recorded(kind, program, sys.argv[1:] if arguments is None else arguments).settings


def load_recorded(kind: type[S], program: str, arguments: list[str]) -> Loaded[S]:
    """Read settings as `load_settings` does, and where they come from. Prints a note on each variable passed over.

    Those of OpenTelemetry, which it reads for itself, are judged as well. Raises SystemExit(78) if anything is wrong.
    """
    try:
        loaded = read_settings(kind, arguments)
        check_variables()
    except (SettingsRefusedError, TracingError) as error:
        for line in str(error).splitlines():
            print(f"{program}: {line}", file=sys.stderr)
        raise SystemExit(EX_CONFIG) from None
    for line in loaded.record.passed_over:
        print(f"{program}: {line}", file=sys.stderr)
    return loaded


def read_settings(kind: type[S], arguments: list[str]) -> Loaded[S]:
    """Read settings of `kind`, and where they come from. Raises SettingsRefusedError, SystemExit(0) for --help."""
    unread = False
    with recording() as record:
        try:
            flags = flags_of(kind, record)
            settings = CliApp.run(kind, cli_args=spelled_out(kind, arguments), cli_settings_source=flags)
            loaded = Loaded(settings, record)
            if not record.unknown:
                return loaded
            lines = []
        except ConfigFileError as error:
            lines = str(error).splitlines()
            unread = isinstance(error, ConfigUnreadableError)
        except ValidationError as error:
            problems = [one for one in error.errors() if not (record.misnamed and _compares(kind, one))]
            lines = [_wrong(kind, problem, record) for problem in problems]
        except FlagsError as error:
            lines = [str(error)]
        except SettingsError as error:
            lines = _unreadable(kind, error, record).splitlines()
        except RecursionError:
            lines = ["settings: a value is nested too deeply"]
    raise SettingsRefusedError([*record.unknown, *lines], unread)


def _compares(kind: type[ServiceSettings], problem: Any) -> bool:
    """Return whether what is wrong is how settings, or all channels, fit each other."""
    location = problem["loc"]
    return not location or ("channels" in kind.model_fields and location == (key_of(kind, "channels"),))


def _wrong(kind: type[ServiceSettings], problem: Any, record: Record) -> str:
    """Return a line about a value that is not as it should be, with where it was given."""
    location, text = problem["loc"], problem["msg"].removeprefix("Value error, ")
    if not location:
        return _contradiction(kind, text, record)
    if problem["type"] == "extra_forbidden" and len(location) > 1:
        text = unknown(str(location[-1]), list(ChannelSettings.model_fields))
    name = next((name for name in kind.model_fields if key_of(kind, name) == location[0]), None)
    if name is None or kind.model_fields[name].annotation is not SecretStr:
        text = f"{text} (got {shown(problem.get('input'))})"
    if name is None:
        return f"{'.'.join(str(part) for part in location)}: {text}"
    return told(kind, name, text, record, location[1:])


def _contradiction(kind: type[ServiceSettings], text: str, record: Record) -> str:
    """Return a line about settings that do not fit each other, with the place of the one that `text` begins with."""
    name = re.split(r"\W", text)[0]
    if name in kind.model_fields and record.origin(key_of(kind, name)) != DEFAULT:
        return told(kind, name, text.removeprefix(f"{name}: "), record)
    return f"settings: {text}" if record.file is None else f"{record.file.path}: {table_of(kind)}: {text}"


def told(kind: type[ServiceSettings], name: str, text: str, record: Record, inside: Path = ()) -> str:
    """Return a line about a field, or what is `inside` it, with where it was given: a flag, a variable or FILE:LINE."""
    key = key_of(kind, name)
    given = flag_of(name) if key in record.flags else record.variables.get(key, name)
    if given != name or record.file is None or key not in record.in_file:
        return f"{'.'.join(str(part) for part in (given, *inside))}: {text}"
    if name == "channels" and inside:
        return str(record.file.error((*record.channels[str(inside[0])], *inside[1:]), text))
    return str(record.file.error((*record.in_file[key], *inside), text))


def _unreadable(kind: type[ServiceSettings], error: SettingsError, record: Record) -> str:
    """Return what is wrong with a value that could not even be parsed, under the name it was given by."""
    flag = re.match(r"Parsing error encountered for (\w+):", str(error))
    if flag is not None:
        for name in kind.model_fields:
            if key_of(kind, name) == flag[1]:
                return f"{flag_of(name)}: not valid JSON"
    found = re.search(r'field "(\w+)"', str(error))
    if found is None or found[1] not in kind.model_fields:
        return str(error)
    cause = error.__cause__
    if isinstance(cause, SettingsError):
        return str(cause)
    variable = record.variables.get(key_of(kind, found[1]), variable_of(kind, found[1]))
    given = variable if Environment.__name__ in str(error) else flag_of(found[1])
    return f"{given}: not valid JSON: {cause or error}"
