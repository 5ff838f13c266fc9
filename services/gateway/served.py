"""Which models the fleet serves: the scheduler's view, asked seldom and kept a moment."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.credentials import acting_for
from penstock.errors import PenstockError
from penstock.fleet import young_for_s
from penstock.scheduler.v1 import scheduler_pb2
from services.gateway.problem import Problem

log = logging.getLogger(__name__)

STALE_S = 5.0
"""A view is renewed after this long: a model that was served a moment ago is worth waiting for."""

WORN_S = 15.0
"""A request for a model that is in the view does not wait for a newer one, unless the scheduler was last asked so long
ago: after a pause, a model that is served no more is not taken for one that is."""

LATELY_S = 300.0
"""A model that was served so long ago is not refused but waited for: its worker may be starting again, which with the
loading of a large model takes minutes."""

FRESH_S = 0.25
"""Before a model is called unknown the view must be this fresh; bounds how often unknown names ask the scheduler."""

LOOK_S = 1.0
"""Longest wait for the scheduler: without it requests go on, it only knows more names."""


@dataclass(frozen=True, slots=True)
class View:
    """What connected workers serve."""

    names: dict[str, str] = field(default_factory=dict)
    """Model by each name it answers to, its own first."""
    adapters: set[str] = field(default_factory=set)
    """Names that are adapters of their model, which answer under their own."""
    workers: dict[str, str] = field(default_factory=dict)
    """Model by worker."""
    windows: dict[str, int] = field(default_factory=dict)
    """Tokens that every worker of a model takes, prompt and output together, by the model's own name."""
    is_whole: bool = True
    """Whether no worker that lives is missing: the scheduler has been up for long enough to know them all."""
    lately: dict[str, str] = field(default_factory=dict)
    """Model by each name that none answers to, and one did within LATELY_S. `adapters` has those of its names too."""

    @property
    def models(self) -> list[str]:
        """Own names of the models, sorted."""
        return sorted(set(self.names.values()))

    def model_of(self, name: str) -> str:
        """Return who answers for `name`: an adapter, else the model by its own name; empty if that is not known.

        Of a name that none answers to just now it is not: its next worker may have another model.

        If `name` is empty, the only model there is.
        """
        if name:
            return name if name in self.adapters else self.names.get(name, "")
        models = {*self.names.values(), *self.lately.values()}
        return models.pop() if len(models) == 1 and self.is_whole else ""


class Seen(NamedTuple):
    """What was last known of a name."""

    model: str
    is_adapter: bool
    at_s: float


class Served:
    """The view, kept fresh as needed."""

    def __init__(
        self, status: Callable[[], Awaitable[scheduler_pb2.StatusResponse]], now_s: Callable[[], float]
    ) -> None:
        """Ask `status` for the fleet; `now_s` is a monotonic clock."""
        self._status = status
        self._now_s = now_s
        self._view = View()
        self._seen: dict[str, Seen] = {}
        """All names that were served within LATELY_S before the last look: no more than fleets have."""
        self._tried_s = self._seen_s = float("-inf")
        self._looking = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None

    async def view(self, fresh_s: float = STALE_S) -> View:
        """Return what is served, as of at most `fresh_s` seconds ago if the scheduler answers."""
        if self._now_s() - self._tried_s > fresh_s:
            async with self._looking:
                if self._now_s() - self._tried_s > fresh_s:
                    await self._look()
        return self._view

    async def check(self, name: str) -> View:
        """Return the view; raises Problem if other models are served than the one called `name`."""
        view = self._at_hand(name) or await self.view()
        if not name or name in view.names or name in view.lately:
            return view
        names = await self.names()
        if name in names or not names:
            return self._view
        text = f"The model `{name[:200]}` does not exist. Served now: {', '.join(sorted(self._view.names))}."
        raise Problem(404, text, "model", "model_not_found")

    async def names(self) -> Collection[str]:
        """Return the names that models answer to, or did lately: all others may be refused. None if that is not known:
        without a scheduler or any worker, and while workers may be missing."""
        view = await self.view(FRESH_S)
        is_known = view.names and view.is_whole and self._now_s() - self._seen_s <= STALE_S
        return {*view.names, *view.lately} if is_known else ()

    def _at_hand(self, name: str) -> View | None:
        """Return the view if the request can go on with it, and have it renewed beside the request if it is time."""
        age_s = self._now_s() - self._tried_s
        if name not in self._view.names or age_s > WORN_S:
            return None
        if age_s > STALE_S and (self._renewal is None or self._renewal.done()):
            # In a context of its own: the caller's has its key, which is to go when its request ends.
            self._renewal = asyncio.create_task(self._renew(), name="served", context=contextvars.Context())
        return self._view

    async def _renew(self) -> None:
        try:
            await self.view()
        except Exception:
            log.exception("what is served cannot be looked at")
            self._tried_s = self._now_s()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                with acting_for():
                    status = await self._status()
        except (PenstockError, TimeoutError):
            self._tried_s = self._now_s()
            return
        self._tried_s = self._seen_s = self._now_s()
        self._view = self._remembering(view_of(status))

    def _remembering(self, view: View) -> View:
        """Return the view with the names that were served lately; forget those for which that is too long ago."""
        now_s = self._now_s()
        self._seen = {name: seen for name, seen in self._seen.items() if now_s - seen.at_s <= LATELY_S}
        self._seen |= {name: Seen(model, name in view.adapters, now_s) for name, model in view.names.items()}
        lately = {name: seen.model for name, seen in self._seen.items() if name not in view.names}
        return replace(view, lately=lately, adapters=view.adapters | {n for n in lately if self._seen[n].is_adapter})


def view_of(status: scheduler_pb2.StatusResponse) -> View:
    """Return what the connected workers of `status` serve."""
    view = View(is_whole=not young_for_s(status))
    for worker in status.workers:
        if worker.connected:
            view.workers[worker.worker_id] = worker.model
            window = view.windows.get(worker.model, worker.max_model_len)
            view.windows[worker.model] = min(window, worker.max_model_len)
            for name in (worker.model, *worker.model_aliases):
                view.names[name] = worker.model
            view.adapters.update(worker.adapters)
    return view
