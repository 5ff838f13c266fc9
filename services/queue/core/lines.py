"""The waiting line of one channel: who waits, in which order, and which of them the scheduler knows.

Order is (priority, seq). A requeued request keeps its seq, and so returns to
the front. Requests for different models do not compete for the same engines, so each
model asked for has a part of the line, and a window, of its own. Anybody can make up the
names of models: those that the scheduler does not say somebody serves share a bound, and
what waits for one that is served never waits for room there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from services.queue.core.ordered import Ordered

MOST_WINDOWS = 8
"""Models of one channel, of those nobody is known to serve, that may each have a whole window announced."""

MOST_BEYOND = 16_384
"""Requests beyond those windows that a channel may have announced over all such models. Both bound what made-up names
make the scheduler remember. Where they take it all, a model that makes progress keeps what it has, and the others have
their turns by how long they have waited: a scheduler that does not say what is served depends on that."""


class Line:
    """Requests of one channel that are ready."""

    __slots__ = (
        "_announced",
        "_bounded",
        "_by_age",
        "_due",
        "_length",
        "_limit",
        "_moved",
        "_parts",
        "_served",
        "_sure",
    )

    def __init__(self) -> None:
        """Make an empty line with closed windows."""
        self._limit = 0
        self._served: dict[str, None] = {}
        self._parts: dict[str, Part] = {}
        # Ordered: a dict finds its first key by a scan over all that were taken from its front.
        self._sure: OrderedDict[str, None] = OrderedDict()
        """Served models of which more may be announced now: they are, in the same step."""
        self._due: OrderedDict[str, None] = OrderedDict()
        """Models of which more may be announced if there is room, the longest waiting first."""
        self._moved: OrderedDict[str, None] = OrderedDict()
        """Models of which an announced request has left: the room is theirs before anybody else's."""
        self._by_age: Ordered[int] = Ordered()
        self._length = 0
        self._announced = 0
        self._bounded = 0
        """Announced requests for models that are not served."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._length

    def holds(self, seq: int, model: str) -> bool:
        """Return whether request `seq`, which asks for `model`, waits here."""
        part = self._parts.get(model)
        return part is not None and seq in part.waiting

    def waiting_for(self, model: str) -> int:
        """Return how many requests that ask for `model` wait here."""
        part = self._parts.get(model)
        return 0 if part is None else len(part.waiting)

    @property
    def announced(self) -> int:
        """Number of waiting requests that the scheduler knows."""
        return self._announced

    @property
    def bounded(self) -> int:
        """Number of those that ask for models which are not served."""
        return self._bounded

    def set_limit(self, limit: int) -> None:
        """Let at most `limit` requests for each model be announced and still waiting at once."""
        wider, self._limit = limit > self._limit, limit
        if wider:  # the same limit is told again when other models are served, and those asked for may be very many
            self._sure = OrderedDict((model, None) for model in self._served if model in self._parts)
            self._due |= dict.fromkeys(self._parts)

    def set_served(self, models: Iterable[str]) -> None:
        """Let requests for these models be announced however many are for others; what is announced remains so."""
        before, self._served = self._served, dict.fromkeys(models)
        for model in before | self._served:
            part = self._parts.get(model)
            if part is None or part.served == (model in self._served):
                continue
            part.served = not part.served
            if part.served:
                self._bounded -= part.announced
                self._sure[model] = None
            else:
                self._bounded += part.announced
                self._sure.pop(model, None)
                self._due[model] = None

    def enter(self, seq: int, priority: int, model: str) -> None:
        """Let request `seq` wait; it is not announced yet."""
        part = self._parts.get(model)
        if part is None:
            part = self._parts[model] = Part(model in self._served)
        part.enter(seq, priority)
        self._by_age.add(seq)
        self._length += 1
        (self._sure if part.served else self._due)[model] = None

    def leave(self, seq: int, model: str) -> bool:
        """Take request `seq` out; return whether it was announced."""
        part = self._parts[model]
        announced = part.leave(seq)
        self._by_age.discard(seq)
        self._length -= 1
        if announced:
            self._announced -= 1
            self._bounded -= not part.served
        if not part.waiting:
            del self._parts[model]
            for models in (self._sure, self._due, self._moved):
                models.pop(model, None)
        elif announced:
            (self._sure if part.served else self._moved)[model] = None
        return announced

    def forget_announcements(self) -> None:
        """Start over with a scheduler that knows nothing: no window, nothing served, nothing announced."""
        self.set_served(())
        self._limit = 0
        self._announced = self._bounded = 0
        for part in self._parts.values():
            part.forget_announcements()

    def announce(self) -> Iterator[int]:
        """Yield the requests that the windows let through now, of each model in order, and mark them announced."""
        if not self._limit:
            return  # `set_limit` looks at every model
        most = MOST_WINDOWS * self._limit + MOST_BEYOND
        for models in (self._sure, self._moved, self._due):
            while models:
                model = next(iter(models))
                part = self._parts[model]
                while (part.served or self._bounded < most) and (seq := part.announce_one(self._limit)) is not None:
                    self._announced += 1
                    self._bounded += not part.served
                    yield seq
                if not part.served and self._bounded >= most:
                    return
                del models[model]

    def oldest(self) -> int | None:
        """Return the waiting request that was submitted first, or None."""
        return self._by_age.first() if self._by_age else None

    def oldest_servable(self) -> int | None:
        """Return the waiting request that was submitted first of those whose model somebody serves, or None.

        As long as nobody says what is served, as without a scheduler or before a worker comes, all are.
        """
        if not self._served:
            return self.oldest()
        parts = [self._parts[model] for model in self._served if model in self._parts]
        return min([part.oldest() for part in parts], default=None)


class Part:
    """Requests of a line that ask for one model; there is one at least."""

    __slots__ = ("_announced", "_by_age", "_unannounced", "served", "waiting")

    def __init__(self, served: bool) -> None:
        """Make it empty; somebody enters at once. `served` is whether the scheduler says that somebody serves it."""
        self.served = served
        self.waiting: dict[int, int] = {}
        """Priorities by request."""
        self._announced: set[int] = set()
        self._unannounced: Ordered[tuple[int, int]] = Ordered()
        self._by_age: Ordered[int] = Ordered()

    @property
    def announced(self) -> int:
        """Number of requests that are announced."""
        return len(self._announced)

    def enter(self, seq: int, priority: int) -> None:
        """Let request `seq` wait."""
        self.waiting[seq] = priority
        self._unannounced.add((priority, seq))
        self._by_age.add(seq)

    def leave(self, seq: int) -> bool:
        """Take request `seq` out; return whether it was announced."""
        priority = self.waiting.pop(seq)
        self._by_age.discard(seq)
        announced = seq in self._announced
        if announced:
            self._announced.discard(seq)
        else:
            self._unannounced.discard((priority, seq))
        return announced

    def forget_announcements(self) -> None:
        """Have nothing announced. What was is put back: a window of it, however many wait."""
        for seq in self._announced:
            self._unannounced.add((self.waiting[seq], seq))
        self._announced.clear()

    def announce_one(self, limit: int) -> int | None:
        """Return the first request that is not announced, and mark it, if fewer than `limit` are; else None."""
        if len(self._announced) >= limit or not self._unannounced:
            return None
        first = self._unannounced.first()
        self._unannounced.discard(first)
        self._announced.add(first[1])
        return first[1]

    def oldest(self) -> int:
        """Return the request that was submitted first."""
        return self._by_age.first()
