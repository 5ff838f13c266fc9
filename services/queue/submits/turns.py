"""Submits that wait for a commit: tenants take turns, and within its turn each one's calls, of which each has a line.

And how many a commit takes in: more while one source alone gives any. And what of a batch must not overtake them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from services.queue.core.entry import BatchKey

Source: TypeAlias = tuple[str, int]
"""Who submits: a tenant, and the number of its stream or call. Turns are its tenant's, for a tenant can open as many
calls as it likes; a gateway names the tenant of each call. Between calls of one tenant there are turns too: without
keys all who name none are one tenant, and nothing else tells them apart, for behind a host may be a gateway with all
its users."""

NOBODY: Source = ("", -1)
"""No source is this one."""

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

TURN = 32
"""Small requests that a turn of a tenant lets in. What its last submit weighs more, up to 1,000 requests of one call,
the tenant makes good by as many turns without any: one that submits singly is not behind one that submits by the
thousand."""

BYTES_LIKE_ONE_MORE = 4096
"""Payload that takes a commit about as long to write as another request does."""


def weight_of(payloads: int, payload_bytes: int) -> int:
    """Return what so many requests are to a commit, in small ones."""
    return payloads + payload_bytes // BYTES_LIKE_ONE_MORE


class _Waiting(NamedTuple):
    """A submit that waits."""

    number: int
    weight: int
    item: Any
    batches: Collection[BatchKey]


class _Tenant:
    """What waits of one tenant."""

    def __init__(self) -> None:
        """Have nothing, and a turn."""
        self.lines: OrderedDict[int, deque[_Waiting]] = OrderedDict()
        """Of each call what waits; the call whose turn is next is first."""
        self.left = TURN
        """What its turn has left, in small requests; below 0 after a large one."""

    def put(self, call: int, waiting: _Waiting) -> None:
        """Have it wait behind what else `call` gave."""
        line = self.lines.get(call)
        if line is None:
            line = self.lines[call] = deque()
        line.append(waiting)

    def take(self) -> _Waiting:
        """Take the first one of the call whose turn it is."""
        call, line = self.lines.popitem(last=False)
        waiting = line.popleft()
        if line:
            self.lines[call] = line
        self.left -= waiting.weight
        return waiting


class SubmitTurns(Generic[T]):
    """Items by source. Those of one source are taken in the order they came in.

    Tenants take turns by the weight of what is taken, and the calls of each in its turn, an item each.
    """

    def __init__(self) -> None:
        """Start empty, with a disk of which nothing is known."""
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Of which something waits, or whose turns are not made good; the one whose turn is next is first."""
        self._waiting = 0
        """Items of all of them."""
        self._of_batch: dict[BatchKey, OrderedDict[int, None]] = {}
        """Numbers of the items with requests of a batch, in order."""
        self._behind: deque[tuple[int, BatchKey, T]] = deque()
        """What must not overtake the items of a batch before its number."""
        self._next_number = 0
        self._writes_ns: deque[int] = deque(maxlen=WRITES_KEPT)
        self._last_source = NOBODY
        self._alone_for = 0
        """Commits with submits since another source than the last one gave any."""

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._waiting or self._behind)

    def put(self, source: Source, weight: int, item: T, batches: Collection[BatchKey] = ()) -> None:
        """Have `item` wait behind what else `source` gave; `weight` is at least 1, `batches` have requests in it."""
        name, call = source
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.put(call, _Waiting(self._next_number, weight, item, batches))
        for batch in batches:
            self._of_batch.setdefault(batch, OrderedDict())[self._next_number] = None
        self._waiting += 1
        self._next_number += 1
        if source != self._last_source:
            self._last_source = source
            self._alone_for = 0

    def put_behind(self, batch: BatchKey, item: T) -> None:
        """Have `item` wait until all that waits now with requests of `batch`, of whatever source, has been taken."""
        self._behind.append((self._next_number, batch, item))

    def wrote(self, took_ns: int) -> None:
        """Note how long a commit has written."""
        self._writes_ns.append(took_ns)

    def take(self, all_of_it: bool = False) -> list[T]:
        """Take items in turn until they weigh what a commit should take in; the last may weigh more than is left.

        What waits behind some follows, if none of these is left.
        """
        taken: list[T] = []
        total = 0
        if sum([len(tenant.lines) for tenant in self._tenants.values()]) > 1:
            self._alone_for = 0  # what one has given before may wait for long
        most = self._most()
        self._alone_for += bool(self._waiting)
        while self._waiting and (total < most or all_of_it):
            name = next(iter(self._tenants))
            tenant = self._tenants[name]
            if tenant.left <= 0:
                tenant.left += TURN
                self._tenants.move_to_end(name)
                continue
            if not tenant.lines:
                del self._tenants[name]
                continue
            waiting = tenant.take()
            taken.append(waiting.item)
            total += waiting.weight
            self._waiting -= 1
            self._leave(waiting)
        if not self._waiting:
            self._tenants.clear()  # nobody waits for what turns would be made good with
        if self._behind:
            taken += self._released()
        return taken

    def _leave(self, taken: _Waiting) -> None:
        for batch in taken.batches:
            numbers = self._of_batch[batch]
            del numbers[taken.number]
            if not numbers:
                del self._of_batch[batch]

    def _released(self) -> list[T]:
        """Take, in order, what waits for nothing any more."""
        released: list[T] = []
        behind, self._behind = self._behind, deque()
        for number, batch, item in behind:
            if next(iter(self._of_batch.get(batch, ())), number) < number:
                self._behind.append((number, batch, item))
            else:
                released.append(item)
        return released

    def _most(self) -> int:
        at_once = SUBMITS_ALONE if self._alone_for >= ALONE_AFTER else SUBMITS_AT_ONCE
        in_proportion = SUBMITS_AT_ONCE * min(self._writes_ns, default=0) // SUBMITS_WRITE_NS
        return min(max(at_once, in_proportion), SUBMITS_AT_MOST)
