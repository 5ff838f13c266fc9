"""Submits that wait for a commit: a line for each who submits, of which the first of each is taken in turn.

And how many a commit takes in: more while one source alone gives any.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

NOBODY = -1
"""No source has this number."""

T = TypeVar("T")

SUBMITS_AT_ONCE = 160
"""Small requests that a commit takes in beside all else that has come: some five milliseconds of work. Grants,
claims and completions wait for the commit before theirs, and without a bound that is one of all that a client with a
large file has submitted meanwhile; engines run out of work, and whoever submits a single request waits for it all."""

SUBMITS_ALONE = 2 * SUBMITS_AT_ONCE
"""What it takes in of one who submits alone. Each commit goes round all services, and the more there is in it the less
often they take turns at the processors; more than this brings nothing (docs/benchmarks.md)."""

ALONE_AFTER = 16
"""Commits in a row with submits of one source alone before it counts as alone: a quarter of a second, in which somebody
who asks now and then, one request after the other, has come back."""

SUBMITS_WRITE_NS = 5_000_000
"""How long a commit may write and sync before the next one takes in more than that, in proportion: on a slow disk
submits would otherwise wait for many syncs, for which all else waits as well. What they weigh takes a third of that to
write, so that more of them do not make for more of them."""

SUBMITS_AT_MOST = 1024
"""What it may come to, on a disk that takes 30 ms."""

WRITES_KEPT = 16
"""Writes of which the shortest says how slow the disk is: the others had more to write, or waited for a processor."""

BYTES_LIKE_ONE_MORE = 4096
"""Payload that takes a commit about as long to write as another request does."""


def weight_of(payloads: int, payload_bytes: int) -> int:
    """Return what so many requests are to a commit, in small ones."""
    return payloads + payload_bytes // BYTES_LIKE_ONE_MORE


class SubmitTurns(Generic[T]):
    """Items by source. Those of one source are taken in the order they came in; sources take turns, an item each."""

    def __init__(self) -> None:
        """Start empty, with a disk of which nothing is known."""
        self._lines: OrderedDict[int, deque[tuple[int, int, T]]] = OrderedDict()
        """Of each source what waits, with its number and weight; the source whose turn is next is first."""
        self._behind: deque[tuple[int, T]] = deque()
        """What must not overtake the items before its number."""
        self._next_number = 0
        self._writes_ns: deque[int] = deque(maxlen=WRITES_KEPT)
        self._last_source = NOBODY
        self._alone_for = 0
        """Commits with submits since another source than the last one gave any."""

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._lines or self._behind)

    def put(self, source: int, weight: int, item: T) -> None:
        """Have `item` wait behind what else `source` gave."""
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = deque()
        line.append((self._next_number, weight, item))
        self._next_number += 1
        if source != self._last_source:
            self._last_source = source
            self._alone_for = 0

    def put_behind(self, item: T) -> None:
        """Have `item` wait until all that waits now, of whatever source, has been taken."""
        self._behind.append((self._next_number, item))

    def wrote(self, took_ns: int) -> None:
        """Note how long a commit has written."""
        self._writes_ns.append(took_ns)

    def take(self, all_of_it: bool = False) -> list[T]:
        """Take items in turn until they weigh what a commit should take in; the last may weigh more than is left.

        What waits behind them follows, if nothing is left that it must not overtake.
        """
        taken: list[T] = []
        total = 0
        if len(self._lines) > 1:
            self._alone_for = 0  # what one has given before may wait for long
        most = self._most()
        self._alone_for += bool(self._lines)
        while self._lines and (total < most or all_of_it):
            source, line = self._lines.popitem(last=False)
            _, weight, item = line.popleft()
            taken.append(item)
            total += weight
            if line:
                self._lines[source] = line
        if self._behind:
            first = min((line[0][0] for line in self._lines.values()), default=self._next_number)
            while self._behind and self._behind[0][0] <= first:
                taken.append(self._behind.popleft()[1])
        return taken

    def _most(self) -> int:
        at_once = SUBMITS_ALONE if self._alone_for >= ALONE_AFTER else SUBMITS_AT_ONCE
        in_proportion = SUBMITS_AT_ONCE * min(self._writes_ns, default=0) // SUBMITS_WRITE_NS
        return min(max(at_once, in_proportion), SUBMITS_AT_MOST)
