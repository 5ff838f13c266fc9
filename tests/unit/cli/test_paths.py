"""Who may not read a path hears it from the command, with its exit status, and not from the parser as wrong usage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.models import ParameterInfo

from penstock.cli.errors import CommandError
from penstock.cli.main import app
from penstock.cli.stack import StackPlan, engine_flags
from penstock.cli.tiny import tiny_model
from services.queue.offline import main as offline


def commands(group: typer.Typer) -> Iterator[Any]:
    """Yield the function of every command of `group`."""
    yield from (command.callback for command in group.registered_commands)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance)


def paths(command: Any) -> Iterator[tuple[str, ParameterInfo]]:
    """Yield what is said of each parameter of a command that is a path, with its name."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *notes = get_args(hint) or (hint,)
        if kind is Path or Path in get_args(kind):
            yield f"{command.__name__} {name}", next(note for note in notes if isinstance(note, ParameterInfo))


def test_the_parser_reads_no_path() -> None:
    found = dict(path for command in commands(app) for path in paths(command))
    assert {"run_batch input_file", "check file", "up config", "restore backup", "create file"} <= found.keys()
    by_typer = {name: said for name, said in found.items() if said.parser is None}  # else by a function of ours
    assert [name for name, said in by_typer.items() if said.readable] == []


NOBODYS = "n" * 300
"""A name that the system does not even look up: it says so, as it says that one may not."""


@pytest.mark.parametrize("tool", [["verify"], ["backup"], ["restore"]], ids=lambda tool: tool[0])
def test_a_store_that_cannot_be_looked_at_is_named(
    tool: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / NOBODYS
    arguments = [*tool, str(there), *([str(tmp_path / "new")] if tool == ["restore"] else [])]
    assert offline(arguments) == 69
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: {there}")
    assert said.endswith(": File name too long\n")


def test_a_data_directory_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"cannot write .*File name too long") as refused:
        engine_flags(StackPlan(tmp_path / NOBODYS, 1, "", (), 0), print)
    assert refused.value.status == 73


def test_a_tiny_model_takes_no_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CommandError, match=r"holds something else \(thesis\.txt\)") as refused:
        tiny_model(tmp_path, vocab_size=512)
    assert refused.value.status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "thesis.txt").unlink()
    for _ in range(2):
        tiny_model(tmp_path, vocab_size=512)
