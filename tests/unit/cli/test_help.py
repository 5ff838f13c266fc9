"""What `--help` says of switches and of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.main import app


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command below this one with the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


def said(*words: str) -> str:
    ran = CliRunner(env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"}).invoke(app, [*words, "--help"])
    assert ran.exit_code == 0
    return ran.stdout


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "penstock")
def test_a_switch_is_not_shown_as_if_a_value_followed_it(path: tuple[str, ...]) -> None:
    """Whoever reads `--undo <bool>` types `--undo true`, which is refused."""
    help_text = said(*path)
    assert "--help" in help_text
    assert "bool" not in help_text.lower()


def test_what_takes_a_value_says_of_which_kind() -> None:
    for path, kind in ((("submit",), "<int>"), (("drain",), "ADDRESS"), (("keys", "create"), "FILE")):
        assert kind in said(*path)


def test_the_variables_of_every_command_are_named_once() -> None:
    help_text = said()
    for name in ("QUEUE", "SCHEDULER", "CONFIG", "KEY", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        assert f"PENSTOCK_{name}" in help_text.replace(",", " ").split()
