"""What a request books where: by group of workers, and by what the policy knows now."""

from __future__ import annotations

from services.scheduler.core.admission.estimate import needed_blocks
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Booked, Entry, Wanted
from services.scheduler.core.fleet import Fleet, Group, Pool


class Bookings:
    """Finds a booking once for each entry and group, until the policy has learned something.

    And which groups may get an entry until the fleet has changed.
    """

    def __init__(self, policy: Policy, fleet: Fleet) -> None:
        """Ask `policy` about the groups of `fleet`."""
        self._policy = policy
        self._fleet = fleet

    def of(self, entry: Entry, pool: Pool | None = None) -> list[Wanted]:
        """Return the groups that may get the entry, with what it would book there and what it is proven to need.

        Those of one pool, or of all. It is to be read and not changed.
        """
        booked = self._booked(entry)
        wanted = booked.wanted
        if wanted is None:
            wanted = booked.wanted = self._wanted(entry, booked.by_group)
        if pool is None or (len(wanted) == 1 and wanted[0][0].pool is pool):
            return wanted
        if booked.by_pool is None:
            booked.by_pool = {}
            for each in wanted:
                booked.by_pool.setdefault(each[0].pool, []).append(each)
        return booked.by_pool.get(pool, [])

    def _booked(self, entry: Entry) -> Booked:
        """Return what is known of the entry's bookings and still holds."""
        lessons, fleet_changes = self._policy.lessons, self._fleet.changes
        booked = entry.booked
        if booked is None or booked.lessons != lessons:
            booked = entry.booked = Booked(lessons, fleet_changes)
        elif booked.fleet_changes != fleet_changes:
            booked.fleet_changes = fleet_changes
            booked.wanted = booked.by_pool = None
            booked.by_group = {group: found for group, found in booked.by_group.items() if group.workers}
        return booked

    def _wanted(self, entry: Entry, known: dict[Group, tuple[int, int]]) -> list[Wanted]:
        """Find the groups of all pools, by what is `known` of some.

        If no worker has what the policy books, the largest book all they have. A smaller one never does: it might
        have to reject what a larger one could run, also while that is full or away.
        """
        wanted = []
        for group in self._fleet.serving(entry.announced.model):
            blocks, least_blocks = known.get(group) or self.in_group(entry, group)
            if least_blocks <= group.shape.capacity_blocks:
                wanted.append((group, blocks, least_blocks))
        roomy = [found for found in wanted if found[1] <= found[0].shape.capacity_blocks]
        if roomy or not wanted:
            return roomy
        largest = max(group.shape.capacity_blocks for group, _, _ in wanted)
        return [
            (group, largest, least_blocks)
            for group, _, least_blocks in wanted
            if group.shape.capacity_blocks == largest
        ]

    def in_group(self, entry: Entry, group: Group) -> tuple[int, int]:
        """Return what the entry books in the group and what it is proven to need, by what the policy knows now."""
        by_group = self._booked(entry).by_group
        found = by_group.get(group)
        if found is None:
            request = entry.announced
            blocks = max(self._policy.booking_blocks(request, group.shape), 1)
            by_group[group] = found = (blocks, needed_blocks(request, group.shape))
        return found
