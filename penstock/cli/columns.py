"""Tables that fit their terminal: headers shorten, then the least important columns go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table
from rich.text import Text

T = TypeVar("T")

CELL_FRAME = 3
"""Columns of the terminal that a cell takes beside its text: a space on either side, and a line."""


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table whose rows show values of type T."""

    header: str
    text: Callable[[T], str | Text]
    short: str = ""
    """Header where the table is too wide; empty means that it is short already."""
    rank: int = 0
    """Columns of the highest rank go first where short headers do not suffice; those of rank 0 stay."""
    name: bool = False
    """Whether it names the row: such a column is left-aligned, and folds rather than lose letters."""


def fitted(title: str, columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> Table:
    """Return a table of `rows` that fits `width` columns of a terminal, as far as columns of rank 0 do."""
    cells = {id(column): [literal(column.text(row)) for row in rows] for column in columns}
    widths = {column: max((text.cell_len for text in texts), default=0) for column, texts in cells.items()}

    def needed(shown: Sequence[Column[T]], headers: Sequence[str]) -> int:
        texts = ((literal(header).cell_len, widths[id(column)]) for column, header in zip(shown, headers, strict=True))
        return 1 + sum(max(text) + CELL_FRAME for text in texts)

    shown = list(columns)
    headers = [column.header for column in shown]
    while needed(shown, headers) > width:
        short = [column.short or column.header for column in shown]
        if headers != short:
            headers = short
            continue
        if not any(column.rank for column in shown):
            break
        # Of equals the rightmost goes.
        shown.remove(max(reversed(shown), key=lambda column: column.rank))
        headers = [column.short or column.header for column in shown]
    table = Table(title=title, title_justify="left")
    for column, header in zip(shown, headers, strict=True):
        table.add_column(
            literal(header),
            justify="left" if column.name else "right",
            overflow="fold" if column.name else "ellipsis",
            no_wrap=not column.name,
        )
    for place in range(len(rows)):
        table.add_row(*(cells[id(column)][place] for column in shown))
    return table


def bare(table: Table) -> Table:
    """Return the table with nothing but its header and rows."""
    table.box = table.title = None
    return table


def literal(text: str | Text, style: str = "") -> Text:
    """Return a text that is shown letter by letter.

    Names come from workers and from those who name channels and models: brackets and colons in them are no markup, and
    what is no letter at all must not reach the terminal, which would take it for an instruction.
    """
    if isinstance(text, Text):
        return text
    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text), style)
