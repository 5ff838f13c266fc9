"""What a variable of the environment says: its value, or what is in the file that `NAME_FILE` names in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import PenstockError

OF_FILE = "_FILE"
"""Behind a variable's name: the variable with the path of a file that holds the value, as secrets are mounted."""


class VariableError(PenstockError, ValueError):
    """A variable is set in both ways, or its file cannot be read; the text begins with its name, and has no value."""


class Said(NamedTuple):
    """What a variable says."""

    text: str
    by: str
    """Name of the variable that is set: that with `_FILE` where the text was in a file."""


def said(name: str, environment: Mapping[str, str] = os.environ) -> Said | None:
    """Return what the variable `name` says, or the file that `NAME_FILE` names; None if neither does.

    A newline at the end of the file is not part of it; a `NAME_FILE` that is empty names none. Raises VariableError.
    """
    path = environment.get(f"{name}{OF_FILE}", "")
    if not path:
        return Said(environment[name], name) if name in environment else None
    by = f"{name}{OF_FILE}"
    if name in environment:
        raise VariableError(f"{name} and {by} are both set; one must go")
    try:
        with open(path, encoding="utf-8") as file:
            return Said(file.read().rstrip("\r\n"), by)
    except OSError as error:
        raise VariableError(f"{by}: {path}: {error.strerror}") from None
    except ValueError as error:  # what is no UTF-8, or a path with a NUL
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise VariableError(f"{by}: {path}: {why}") from None
