"""How requests stand that somebody watches by name: which of them live, and of which nothing more comes."""

from __future__ import annotations

from collections.abc import Collection

from services.queue.committer import Committer
from services.queue.core.effects import Inspected
from services.queue.core.entry import request_id_of
from services.queue.core.lifecycle import State
from services.queue.core.messages import Inspect
from services.queue.watch.hub import Watcher


class Standing:
    """Asks the machine, as of what is durable. Every method raises RefusedError if the store cannot be read."""

    def __init__(self, committer: Committer, store_id: str) -> None:
        """Ask the machine of `committer`."""
        self._committer = committer
        self._store_id = store_id

    async def states(self, seqs: Collection[int], sees: str | None = None) -> dict[int, State]:
        """Return the states of those of the requests that live, or are dead letters.

        For a caller that `sees` one tenant only, without others'.
        """
        if not seqs:
            return {}
        names = tuple(request_id_of(self._store_id, seq) for seq in seqs)
        found: Inspected = await self._committer.ask(lambda ticket: Inspect(ticket, names, sees))
        return {view.seq: view.state for view in found.views if view is not None}

    async def live(self, seqs: Collection[int]) -> set[int]:
        """Return those of the requests that have not ended."""
        return {seq for seq, state in (await self.states(seqs)).items() if state is not State.DEAD}

    async def gone(self, seqs: Collection[int], watcher: Watcher) -> set[int]:
        """Return those of requests that had ended, and whose results were not found then, of which nothing more comes.

        The others are dead letters that were requeued before they were read: they live, or have ended once more, which
        `watcher`, who follows them, has been told.
        """
        return set(seqs) - await self.live(seqs) - watcher.ended.keys() if seqs else set()
