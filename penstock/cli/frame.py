"""One frame of `penstock top`, fitted to its terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.columns import Column, bare, fitted, literal
from penstock.cli.screen import Section, fitted_screen, in_one_line, lines_section
from penstock.live.departed import Departed
from penstock.live.history import Series
from penstock.live.state import tally
from penstock.live.view import Channel, Fleet, View, Worker, busiest_first, worst_first

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
"""Of the channels, by name; the seventh shares the first one's."""

FULL, FREE = "█", "·"
SPARKS = "▁▂▃▄▅▆▇█"
MOST_DEPARTED = 20
"""Workers named that have gone: more than a line of a terminal has room for."""

STATE_STYLES = {"up": "green", "draining": "yellow", "drained": "yellow", "gone": "red"}

BAR_WIDTH, NARROW_BAR_WIDTH, WIDE = 24, 12, 100
"""Characters of a worker's bar, and where there are fewer than WIDE columns."""

SPARK_WIDTH = 12
"""Characters of what is left of the KV usage before: one a sample, the latest ones."""


def frame(view: View, history: Series, width: int, height: int | None = None) -> RenderableType:
    """Return what a terminal of `width` columns shows of `view`, with the KV usage before it.

    Without a `height` that is everything; else as much as goes into so many lines, and how much is left out.
    """
    colours = {channel.name: COLOURS[place % len(COLOURS)] for place, channel in enumerate(view.channels)}
    capacity = view.fleet.capacity_blocks
    above = [_headline(view.fleet), _second_line(view.fleet)]
    above += [_departed(view.departed)] if view.departed else []
    problems = lines_section("problems", [in_one_line(literal(problem, "bold red")) for problem in view.problems])
    channels = Section(
        "channels", view.channels, lambda rows, tight: _channels(rows, capacity, colours, width, tight), busiest_first
    )
    workers = Section(
        "workers",
        view.workers,
        lambda rows, tight: _workers(rows, colours, history, width, tight),
        lambda rows: worst_first(sorted(rows, key=lambda w: -round(w.kv_usage, 1))),
        lambda rows: tally(worker.state for worker in rows),
    )
    return fitted_screen(above, [problems, channels, workers], [], width, height)


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """Return a number as the frame shows it; "-" where it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def age(seconds: float | None) -> str:
    """Return an age in the largest unit that leaves two digits or more."""
    if not seconds:
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def bar(parts: Sequence[tuple[int, str]], whole: int, width: int) -> Text:
    """Return a stacked bar of `width` characters: each part of `whole` in its style, then what is free.

    The edge of each part is where the sum up to it is, so rounding errors do not add up; a part that is not empty
    has at least one character as long as there are any. Parts of more than there is, as requests may hold that share
    blocks, fill it among them.
    """
    whole = max(whole, sum(amount for amount, _ in parts))
    text = Text()
    summed = edge = 0
    for amount, style in parts:
        summed += amount
        end = min(width, max(round(summed / whole * width) if whole else 0, edge + bool(amount)))
        text.append(FULL * (end - edge), style)
        edge = end
    text.append(FREE * (width - edge), "dim")
    return text


def spark(values: Sequence[float | None], width: int) -> str:
    """Return the last `width` values, each from 0 to 1, as a line of blocks; a gap where there is none."""
    last = list(values)[-width:]
    return "".join(" " if v is None else SPARKS[min(int(v * len(SPARKS)), len(SPARKS) - 1)] for v in last)


def _headline(fleet: Fleet) -> Text:
    text = Text()
    for value, unit in (
        (number(fleet.waiting), "waiting"),
        (number(fleet.running), "running"),
        (number(fleet.requests_per_s, 1), "requests/s"),
        (number(fleet.tokens_per_s), "tokens/s"),
    ):
        text.append("   " if text else "").append(value, "bold").append(f" {unit}", "dim")
    return text


def _second_line(fleet: Fleet) -> Text:
    said = [
        f"drift {number(fleet.drift_blocks)}",
        f"preemptions {number(fleet.preemptions)}",
        f"dead letters {number(fleet.dead)}",
        f"results {number(fleet.results)}",
        f"policy {fleet.policy or '-'}",
    ]
    return Text(" · ".join(said), style="dim")


def _departed(departed: Sequence[Departed]) -> Text:
    """Return who has gone lately: as many as go into a line."""
    each = (f"{one.name} ({f'{one.was} until ' if one.was else ''}{age(one.ago_s)} ago)" for one in departed)
    return in_one_line(literal(f"{len(departed):,} left lately: {', '.join(islice(each, MOST_DEPARTED))}", "red"))


def _channels(
    channels: Sequence[Channel], capacity: int, colours: dict[str, str], width: int, tight: bool
) -> RenderableType:
    def held(channel: Channel) -> Text:
        return bar([(channel.held_blocks or 0, colours[channel.name])], capacity, NARROW_BAR_WIDTH)

    columns: list[Column[Channel]] = [
        Column("channel", lambda c: Text(f"{FULL} ", colours[c.name]).append(c.name, "default"), name=True),
        Column("waiting", lambda c: number(c.waiting)),
        Column("oldest", lambda c: age(c.oldest_s), rank=2),
        Column("running", lambda c: number(c.running), rank=3),
        Column("held", lambda c: number(c.held_blocks)),
        Column("of all blocks", held, short="of all", rank=4),
        Column("requests/s", lambda c: number(c.requests_per_s, 1), short="req/s", rank=1),
        Column("tokens/s", lambda c: number(c.tokens_per_s), short="tok/s"),
    ]
    return _plain(fitted("channels", columns, channels, width), tight)


def _workers(
    workers: Sequence[Worker], colours: dict[str, str], history: Series, width: int, tight: bool
) -> RenderableType:
    wide = BAR_WIDTH if width >= WIDE else NARROW_BAR_WIDTH

    def blocks(worker: Worker) -> Text:
        held = [(held, colours.get(channel, "white")) for channel, held in worker.held_blocks.items()]
        return bar(held, worker.capacity_blocks, wide)

    def held_by(channel: str) -> Callable[[Worker], str]:
        return lambda worker: number(worker.held_blocks.get(channel, 0))

    channels = sorted({channel for worker in workers for channel in worker.held_blocks})
    columns: list[Column[Worker]] = [
        Column("worker", lambda w: w.name, name=True),
        Column("state", lambda w: Text(w.state, STATE_STYLES[w.state]), name=True),
        Column("blocks", blocks, rank=1),
        Column("held", lambda w: number(w.all_held_blocks)),
        *(Column(channel, held_by(channel), rank=8) for channel in channels),
        Column("free", lambda w: number(w.free_blocks)),
        Column("drift", lambda w: number(w.drift_blocks), rank=4),
        Column("in engine", _in_engine, short="runs", rank=2),
        Column("KV", lambda w: f"{w.kv_usage:.0%}"),
        Column("KV lately", lambda w: spark(history.usage.get(w.name, ()), SPARK_WIDTH), rank=7),
        Column("step", lambda w: f"{w.step_ms:.1f} ms", rank=6),
        Column("preempted", lambda w: number(w.preemptions), short="pre", rank=3),
        Column("model", lambda w: w.model, rank=9, name=True),
    ]
    return _plain(fitted("workers", columns, workers, width), tight)


def _in_engine(worker: Worker) -> str:
    """Return what runs in the engine, and after a plus what waits inside it: a request or two granted ahead."""
    return f"{worker.running}+{worker.waiting}" if worker.waiting else f"{worker.running}"


def _plain(table: Table, tight: bool) -> Table:
    """Return the table with lines only where they help: a frame is looked at, not copied."""
    table.box = box.SIMPLE_HEAD
    return bare(table) if tight else table
