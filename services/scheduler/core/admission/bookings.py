"""What a request books where: by how workers count tokens into blocks, and by what the policy knows now."""

from __future__ import annotations

from typing import Final

from services.scheduler.core.admission.estimate import needed_blocks
from services.scheduler.core.admission.policy import Policy
from services.scheduler.core.entry import Booked, Entry, Options, Wanted
from services.scheduler.core.fleet import Fleet, Group, Pool

MOST_GROUPS_KEPT: Final = 1 << 16
"""Groups in all options that are kept for the next request that books alike, some 20 MiB."""


class Bookings:
    """Finds a booking once for each entry and way to count tokens into blocks, until the policy has learned something.

    And which groups may get it, once for all entries of a model that book alike, until the fleet has changed. So an
    entry costs no look at each of many groups that differ only in their models. Owns what is known of those.
    """

    def __init__(self, policy: Policy, fleet: Fleet) -> None:
        """Ask `policy` about the groups of `fleet`."""
        self._policy = policy
        self._fleet = fleet
        self._fleet_changes = -1
        self._ways: dict[str, list[Group]] = {}
        """One group for each way to count tokens into blocks, by the model they serve."""
        self._options: dict[tuple[str, tuple[tuple[int, int], ...]], Options] = {}
        self._groups_kept = 0

    def of(self, entry: Entry, pool: Pool | None = None) -> list[Wanted]:
        """Return the groups that may get the entry, with what it would book there and what it is proven to need.

        Those of one pool, or of all. It is to be read and not changed.
        """
        return self.options(entry, pool).wanted

    def options(self, entry: Entry, pool: Pool | None = None) -> Options:
        """Return where the entry may run, in one pool or in all."""
        booked = self._booked(entry)
        options = booked.options
        if options is None:
            options = booked.options = self._find(entry)
        return options if pool is None else options.in_pool(pool)

    def in_group(self, entry: Entry, group: Group) -> tuple[int, int]:
        """Return what the entry books in the group and what it is proven to need, by what the policy knows now."""
        by_geometry = self._booked(entry).by_geometry
        found = by_geometry.get(group.geometry)
        if found is None:
            request = entry.announced
            blocks = max(self._policy.booking_blocks(request, group.shape), 1)
            by_geometry[group.geometry] = found = (blocks, needed_blocks(request, group.shape))
        return found

    def _booked(self, entry: Entry) -> Booked:
        """Return what is known of the entry's bookings and still holds."""
        lessons, fleet_changes = self._policy.lessons, self._fleet.changes
        booked = entry.booked
        if booked is None or booked.lessons != lessons:
            booked = entry.booked = Booked(lessons, fleet_changes)
        elif booked.fleet_changes != fleet_changes:
            booked.fleet_changes = fleet_changes
            booked.options = None
            present = self._fleet.geometries
            booked.by_geometry = {way: found for way, found in booked.by_geometry.items() if way in present}
        return booked

    def _find(self, entry: Entry) -> Options:
        """Find where the entry may run, unless that is known of one that books alike."""
        model = entry.announced.model
        if self._fleet_changes != self._fleet.changes:
            self._fleet_changes = self._fleet.changes
            self._ways.clear()
            self._forget()
        ways = self._ways.get(model)
        if ways is None:
            ways = list({group.geometry: group for group in self._fleet.serving(model)}.values())
            self._ways[model] = ways
        booked = tuple([self.in_group(entry, group) for group in ways])
        options = self._options.get((model, booked))
        if options is None:
            least_blocks = min((blocks for blocks, _ in booked), default=0)
            options = Options(self._wanted(entry), least_blocks, self._fleet.serving(model))
            self._groups_kept += len(options.wanted) + 1
            if self._groups_kept > MOST_GROUPS_KEPT:
                self._forget()
            self._options[model, booked] = options
        return options

    def _forget(self) -> None:
        self._options.clear()
        self._groups_kept = 0

    def _wanted(self, entry: Entry) -> list[Wanted]:
        """Find the groups of all pools.

        If no worker has what the policy books, the largest book all they have. A smaller one never does: it might
        have to reject what a larger one could run, also while that is full or away.
        """
        wanted = []
        for group in self._fleet.serving(entry.announced.model):
            blocks, least_blocks = self.in_group(entry, group)
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
