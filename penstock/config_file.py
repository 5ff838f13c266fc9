"""The one configuration file: TOML, with the line of every key.

It has a table per service, `[common]` for what all of them share, an array `[[channels]]`, and `[client]` for the
commands. Which keys a service knows is its own affair; here it is read, and here a key becomes "FILE:LINE".
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeAlias

from penstock.address import AddressError, check_address
from penstock.errors import PenstockError
from penstock.variables import said

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
"""Environment variable with the path of the file."""

SERVICES = ("queue", "scheduler", "worker", "gateway")
CALLERS = SERVICES[1:]
"""Those that call others: the queue is called alone."""

TABLES = ("common", "channels", *SERVICES, "client")
"""Every name that may stand at the top of the file."""

CLIENT_ADDRESSES = ("queue", "scheduler")
CLIENT_KEYS = (*CLIENT_ADDRESSES, "tls_ca", "tls_cert", "tls_key")
"""What `[client]` may say: the addresses that commands ask, and how they speak TLS."""

KEY_ELSEWHERE = "unknown; PENSTOCK_KEY, or the file that PENSTOCK_KEY_FILE names, holds the key of commands"
"""What to say of a key in `[client]`, which looks much like `tls_key`."""

ALIKE = frozenset(
    ("channels", "config", "insecure", "key", "keys", "reflection", "tls_ca", "tls_cert", "tls_client_auth", "tls_key")
)
"""Settings whose variable has the same name for every service; that of any other has the service's name in it."""

MAX_BYTES = 1 << 20
"""A larger file is not a configuration; ours take a few kilobytes."""

NUL_FAULT = "must not have a NUL character, which no name of a file or host can have"
"""What is said of a text with one: TOML can write it, and to the system it would end the name."""

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands: names of tables and keys, and places in arrays."""

_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]#]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([^=#\[\]{}]+?)\s*=")
_AT_LINE = re.compile(r"^(.*) \(at line (\d+), column \d+\)$", re.DOTALL)


class ConfigFileError(PenstockError, ValueError):
    """The file cannot be read or says something it may not; the text begins with its name, and the line if known."""


MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, with which Windows begins a file."""


class ConfigUnreadableError(ConfigFileError):
    """The file cannot be opened or read now, which says nothing of what is in it."""


@dataclass(frozen=True)
class ConfigFile:
    """A file that was read."""

    path: str
    content: dict[str, Any]
    lines: dict[Path, int] = field(repr=False)

    @classmethod
    def read(cls, path: str, unknown_tables: list[str] | None = None) -> ConfigFile:
        """Read the file; raises ConfigFileError if that fails, or if names at its top are unknown or no tables.

        What is to be said of such names goes to `unknown_tables` instead, for one who wants to know what else is wrong;
        what is no table is then left out.
        """
        try:
            text = _bytes_of(path)
        except OSError as error:
            raise ConfigUnreadableError(f"{path}: cannot be read: {error.strerror}") from None
        if len(text) > MAX_BYTES:
            raise ConfigFileError(f"{path}: larger than {MAX_BYTES} bytes")
        try:
            decoded = text.removeprefix(MARK).decode()
            found = cls(path, tomllib.loads(decoded), positions(decoded))
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            raise ConfigFileError(f"{path}:{line}: not UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigFileError(f"{path}{_where(str(error), len(decoded.splitlines()))}") from None
        except RecursionError:
            raise ConfigFileError(f"{path}: nested too deeply") from None
        except ValueError as error:  # a number with more digits than Python converts
            raise ConfigFileError(f"{path}: {error}") from None
        found._check_top(unknown_tables)
        return found

    def table(self, name: str) -> dict[str, Any]:
        """Return a table of the top, empty if it is not there; raises ConfigFileError if it is no table."""
        value = self.content.get(name, {})
        if not isinstance(value, dict):
            raise self.error((name,), f"must be a table: write [{name}]")
        return value

    def place(self, path: Path) -> str:
        """Return "FILE:LINE" of a value, or of the innermost thing around it whose line is known."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines[path]}" if path else self.path

    def error(self, path: Path, text: str) -> ConfigFileError:
        """Return the error about a value, with its place and its name."""
        return ConfigFileError(f"{self.place(path)}: {dotted(path)}: {text}")

    def _check_top(self, unknown_tables: list[str] | None) -> None:
        strays = [str(error) for error in self.refuse_unknown((), list(TABLES))]
        for name in [name for name in TABLES if name != "channels"]:
            try:
                self.table(name)
            except ConfigFileError as error:
                strays.append(str(error))
                del self.content[name]
        if unknown_tables is not None:
            unknown_tables += strays
        elif strays:
            raise ConfigFileError("\n".join(strays))

    def refuse_unknown(self, path: Path, known: list[str]) -> list[ConfigFileError]:
        """Return an error for each key of the table at `path` that is not `known`."""
        table: Any = self.content
        for part in path:
            table = table[part]
        return [self.error((*path, key), unknown(key, known)) for key in table if key not in known]


def is_read_once(path: str) -> bool:
    """Whether a pipe or the like is at `path`: who reads it first has its content, and nobody can follow it."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and path != os.devnull


def _bytes_of(path: str) -> bytes:
    """Return what a configuration file holds, and a byte too many of a larger one. Raises OSError."""
    if is_read_once(path):
        found = os.stat(path)
        return _first_read(path, (found.st_dev, found.st_ino))
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


@cache
def _first_read(path: str, _which: tuple[int, int]) -> bytes:
    """Read a pipe, for all in this process who ask for the same one: the next to read it would find it empty."""
    with open(path, "rb") as pipe:
        return pipe.read(MAX_BYTES + 1)


def positions(text: str) -> dict[Path, int]:
    """Return the line of every table, array element and key of a TOML text that tomllib accepts.

    A line inside a string of several lines may be taken for a key; such a path leads to no value, and is not asked for.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            name = _parts(header[2])
            table = _rooted(name, counts)
            if header[1] == "[[":
                lines.setdefault(table, number)
                element = counts[table] = counts.get(table, -1) + 1
                table = (*table, element)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_parts(key[1])), number)
    return lines


def _rooted(name: Path, counts: Mapping[Path, int]) -> Path:
    """Return the path of a table's name, which goes on in the last element of any array it passes."""
    path: Path = ()
    for part in name[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path])
    return (*path, *name[-1:])


def _parts(name: str) -> Path:
    """Return the parts of a dotted key as TOML has them; what only looked like a key has none."""
    try:
        found: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    parts = []
    while isinstance(found, dict):
        ((part, found),) = found.items()
        parts.append(part)
    return tuple(parts)


def _where(text: str, last_line: int) -> str:
    """Return tomllib's message with its line in front, as compilers say it."""
    found = _AT_LINE.match(text)
    return f":{found[2]}: {found[1]}" if found else f":{last_line}: {text}"


def dotted(path: Path) -> str:
    """Return a path as people write it: `queue.listen`, `channels[0].weight`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def unknown(name: str, known: list[str]) -> str:
    """Return that a name is unknown, with the nearest known one or all of them."""
    near = get_close_matches(name, known, 1)
    return f"unknown; did you mean {near[0]}?" if near else f"unknown; known: {', '.join(sorted(known))}"


def _text_fault(value: object) -> str:
    """Return what is wrong with a value that is to name a file or an address; empty if nothing is."""
    if not isinstance(value, str):
        return "must be a string"
    return NUL_FAULT if "\0" in value else ""


def client_faults(file: ConfigFile) -> Iterator[ConfigFileError]:
    """Yield what is wrong with `[client]`, which no service reads."""
    found = file.table("client")
    if "key" in found:
        yield file.error(("client", "key"), KEY_ELSEWHERE)
    if found:
        yield from file.refuse_unknown(("client",), [*CLIENT_KEYS, "key"])
    for key in [key for key in CLIENT_KEYS if key in found]:
        if fault := _text_fault(found[key]):
            yield file.error(("client", key), fault)
        elif key in CLIENT_ADDRESSES:
            try:
                check_address(found[key])
            except AddressError as error:
                yield file.error(("client", key), str(error))


def config_path(environment: Mapping[str, str] = os.environ) -> str:
    """Return the path of the file that the environment names; empty if it names none. Raises VariableError."""
    found = said(CONFIG_VARIABLE, environment)
    return found.text if found else ""


def variable_of(service: str, name: str) -> str:
    """Return the environment variable of a setting of a service."""
    return f"PENSTOCK_{name if name in ALIKE else f'{service}_{name}'}".upper()


def told(service: str, name: str, environment: Mapping[str, str] = os.environ) -> Any:
    """Return what a setting of a service is told besides its command line, as its source has it; None if nothing.

    The first that says it counts, as for the service itself: variable, own table of the file, `[common]`; without the
    name of a service, what all are told. Nothing else of the file is judged, which the service does.
    Raises VariableError, and ConfigFileError if the file cannot be read.
    """
    found = said(variable_of(service, name), environment)
    if found is not None:
        return found.text
    path = config_path(environment)
    if not path:
        return None
    file = ConfigFile.read(path, unknown_tables=[])
    own = file.table(service) if service else {}
    return own.get(name, file.table("common").get(name))


def client_table(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what the file that the environment names tells commands: `[client]`, its TLS from `[common]` if need be.

    Empty without a file; raises VariableError and ConfigFileError.
    """
    path = config_path(environment)
    if not path:
        return {}
    file = ConfigFile.read(path)
    for wrong in client_faults(file):
        raise wrong
    found = file.table("client")
    if not any(key.startswith("tls_") for key in found):
        shared = file.table("common")
        for key in [key for key in CLIENT_KEYS if key.startswith("tls_") and key in shared]:
            if fault := _text_fault(shared[key]):
                raise file.error(("common", key), fault)
            found = found | {key: shared[key]}
    return found
