"""The command line's parts: typer's, with help that shows switches as what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

F = TypeVar("F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose switches have no type in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, that for help included."""
        return _without_types_of_switches(super().get_params(ctx))


class Commands(TyperGroup):
    """A group of commands whose switches have no type in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, that for help included."""
        return _without_types_of_switches(super().get_params(ctx))


class App(typer.Typer):
    """An application made of these."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of typer.Typer."""
        super().__init__(cls=Commands, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Return what registers a function as a command, with the settings of typer.Typer.command."""
        return super().command(name, cls=Command, **settings)


def _without_types_of_switches(parameters: list[Any]) -> list[Any]:
    """Return the parameters, with nothing to show where typer writes `<bool>`: no value may follow a switch."""
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    return parameters
