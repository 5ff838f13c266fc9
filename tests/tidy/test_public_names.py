"""What docs/client.md tells a program to catch, and what the client returns, is in `penstock`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import results

ROOT = Path(__file__).resolve().parents[2]


def documented_errors() -> list[str]:
    """Return the names in the first column of the table of errors."""
    _, _, after = (ROOT / "docs" / "client.md").read_text().partition("\n## Errors\n")
    table, _, _ = after.partition("\n## ")
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for first in firsts for name in re.findall(r"`(\w+)`", first)]


def test_every_documented_error_can_be_caught_by_its_name() -> None:
    found = documented_errors()
    assert {"InvalidRequest", "NotPossibleNow", "AddressError", "TlsError", "KeysError"} <= set(found)
    assert set(found) <= set(penstock.__all__)
    for name in found:
        assert issubclass(getattr(penstock, name), penstock.PenstockError)


def test_every_type_that_the_client_returns_can_be_named() -> None:
    made = {name for name, kind in inspect.getmembers(results, inspect.isclass) if kind.__module__ == results.__name__}
    assert {"Cancelled", "DeadLetter", "Requeued", "Result"} <= made <= set(penstock.__all__)


@pytest.mark.parametrize("name", penstock.__all__)
def test_a_public_name_is_that_of_what_it_names(name: str) -> None:
    assert getattr(penstock, name).__name__ == name


def test_an_interpreter_that_has_used_nothing_yet_completes_every_name() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import penstock; print(*dir(penstock))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(penstock.__all__) <= set(told.stdout.split())
