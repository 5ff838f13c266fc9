"""One frame of `penstock top`, fitted to the width of its terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.columns import Column, fitted
from penstock.live.history import Series
from penstock.live.view import Channel, Fleet, View, Worker

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
"""Of the channels, by name; the seventh shares the first one's."""

FULL, FREE = "█", "·"
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {"up": "green", "draining": "yellow", "drained": "yellow", "gone": "red"}

BAR_WIDTH, NARROW_BAR_WIDTH, WIDE = 24, 12, 100
"""Characters of a worker's bar, and where there are fewer than WIDE columns."""

SPARK_WIDTH = 12
"""Characters of what is left of the KV usage before: one a sample, the latest ones."""


def frame(view: View, history: Series, width: int) -> RenderableType:
    """Return what a terminal of `width` columns shows of `view`, with the KV usage before it."""
    colours = {channel.name: COLOURS[place % len(COLOURS)] for place, channel in enumerate(view.channels)}
    parts: list[RenderableType] = [_headline(view.fleet)]
    parts += [Text(problem, style="bold red", overflow="ellipsis", no_wrap=True) for problem in view.problems]
    parts += [_channels(view, colours, width), _workers(view.workers, colours, history, width), _footline(view.fleet)]
    return Group(*parts)


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


def _footline(fleet: Fleet) -> Text:
    said = [
        f"drift {number(fleet.drift_blocks)}",
        f"preemptions {number(fleet.preemptions)}",
        f"dead letters {number(fleet.dead)}",
        f"results {number(fleet.results)}",
        f"policy {fleet.policy or '-'}",
    ]
    return Text(" · ".join(said), style="dim")


def _channels(view: View, colours: dict[str, str], width: int) -> Table:
    capacity = sum(worker.capacity_blocks for worker in view.workers if worker.state != "gone")

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
    return _plain(fitted("channels", columns, view.channels, width))


def _workers(workers: Sequence[Worker], colours: dict[str, str], history: Series, width: int) -> Table:
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
    return _plain(fitted("workers", columns, workers, width))


def _in_engine(worker: Worker) -> str:
    """Return what runs in the engine, and after a plus what waits inside it: a request or two granted ahead."""
    return f"{worker.running}+{worker.waiting}" if worker.waiting else f"{worker.running}"


def _plain(table: Table) -> Table:
    """Return the table with lines only where they help: a frame is looked at, not copied."""
    table.box = box.SIMPLE_HEAD
    return table
