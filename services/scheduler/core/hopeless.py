"""What waits and can never run: which requests have to be looked at again when the fleet has changed.

A request is hopeless if workers serve its model and none could ever hold it. With the fleet that becomes so only where
the largest worker of a group is smaller than it was, or gone, or where the first come to serve a model. A worker that
opens its stream again as it was changes none of that, so nothing that waits is looked at for it.
"""

from __future__ import annotations

from services.scheduler.core.fleet import Fleet, Groups


class Hopeless:
    """Compares the fleet with what it was when all that waits was last looked at, which it owns."""

    def __init__(self, fleet: Fleet) -> None:
        """Start with no worker: nothing is hopeless."""
        self._fleet = fleet
        self._seen: Groups = {}
        self._served: set[str] = set()

    def opened(self) -> None:
        """Note a worker that has opened its stream: what is announced from now on is held against it.

        It may be gone, or smaller, before anything is looked at again. (Of a group that is new all is looked at then.)
        """
        for group, blocks in self._fleet.largest_blocks().items():
            if group in self._seen:
                self._seen[group] = max(self._seen[group], blocks)

    def models_to_review(self) -> set[str]:
        """Return the models, "" for any, whose requests may be hopeless since this was last asked."""
        groups = self._fleet.largest_blocks()
        if groups == self._seen:
            return set()
        before, self._seen = self._seen, groups
        served, self._served = self._served, set(self._fleet.served())
        names = self._served - served
        for group, blocks in before.items():
            if groups.get(group, -1) < blocks:
                names.update(("", *group.models))
        return names
