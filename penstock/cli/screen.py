"""A screen of so many lines: what it has no room for is counted, and never cut off without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.text import Text

T = TypeVar("T")

SEE_ALL = "penstock status --once"
"""Shows everything, for a terminal that scrolls."""

RULER = Console(file=StringIO())
"""Draws what is measured."""


@dataclass(frozen=True, slots=True)
class Section(Generic[T]):
    """Rows of one kind."""

    noun: str
    """What they are, several of them."""
    rows: Sequence[T]
    draw: Callable[[Sequence[T], bool], RenderableType]
    """Draws rows; the second argument tells it to do without a title and lines, which would take the room of rows."""
    first: Callable[[Sequence[T]], Sequence[T]] = lambda rows: rows
    """Sorts them, those to look at first; asked only where not all fit."""
    tally: Callable[[Sequence[T]], str] = lambda _: ""
    """Says in a word what those are that do not fit."""
    head: int = 1
    """Lines that it takes beside its rows where it is drawn without a title."""


def fitted_screen(
    above: Sequence[Text], sections: Sequence[Section[Any]], below: Sequence[Text], width: int, height: int | None
) -> RenderableType:
    """Return `above`, the sections and `below` in `height` lines of `width` columns; without a height all of them.

    Sections that are too long for it share alike what the others leave. What is above and below is always there, and
    where it would take more than a third, each text of it in one line.
    """
    whole = Group(*above, *(section.draw(section.rows, False) for section in sections), *below)
    if height is None:
        return whole
    rows = sum(len(section.rows) for section in sections)
    if len(above) + rows + len(below) <= height and lines_of(whole, width) <= height:
        return whole
    if (fixed := lines_of(Group(*above, *below), width)) > height // 3:
        above, below = [*map(in_one_line, above)], [*map(in_one_line, below)]
        fixed = len(above) + len(below)
    wants = [section.head + len(section.rows) for section in sections]
    parts: list[RenderableType] = []
    for section, most in zip(sections, shares(height - fixed, wants), strict=True):
        parts += _cut(section, most, width)
    return Group(*above, *parts, *below)


def shares(whole: int, wants: Sequence[int]) -> list[int]:
    """Return what each gets of `whole`: all it wants, or as much as every other one that does not get all."""
    given = [0] * len(wants)
    left = max(0, whole)
    open_ = [place for place, want in enumerate(wants) if want]
    while open_:
        share, rest = divmod(left, len(open_))
        modest = [place for place in open_ if wants[place] <= share]
        if not modest:
            for place in sorted(open_, key=lambda place: -wants[place]):  # what does not divide goes to who wants most
                given[place] = share + (rest > 0)
                rest -= 1
            break
        for place in modest:
            given[place] = wants[place]
            left -= wants[place]
            open_.remove(place)
    return given


def lines_of(part: RenderableType, width: int) -> int:
    """Return how many lines of `width` columns a part takes."""
    return len(RULER.render_lines(part, RULER.options.update(width=width, height=None), pad=False))


def _cut(section: Section[Any], most: int, width: int) -> list[RenderableType]:
    """Return what `most` lines can show of the section, the last one saying what is left out."""
    if not most:
        return []
    if section.head + len(section.rows) <= most and lines_of(whole := section.draw(section.rows, True), width) <= most:
        return [whole]
    rows = section.first(section.rows)
    shown = max(0, min(len(rows), most - 1) - section.head)
    # A name that folds takes more than a line.
    while shown and lines_of(section.draw(rows[:shown], True), width) > most - 1:
        shown -= 1
    left = rows[shown:]
    tally = section.tally(left)
    said = f"and {len(left):,} more {section.noun}" if shown else f"{len(left):,} {section.noun}"
    more = Text(f" {said}{f' ({tally})' if tally else ''}: {SEE_ALL}", style="bold")
    return [*([section.draw(rows[:shown], True)] if shown else []), in_one_line(more)]


def lines_section(noun: str, lines: Sequence[Text]) -> Section[Text]:
    """Return a section of mere lines."""
    return Section(noun, lines, lambda rows, tight: Group(*(map(in_one_line, rows) if tight else rows)), head=0)


def in_one_line(text: Text) -> Text:
    """Return the text so that what a line has no room for becomes an ellipsis."""
    text = text.copy()
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
