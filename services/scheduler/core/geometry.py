"""How engines count tokens into blocks: by that, and by the models they answer to, workers form groups (`fleet`)."""

from __future__ import annotations

from services.scheduler.core.messages import EngineShape


def token_geometry(shape: EngineShape) -> EngineShape:
    """Return the shape without what does not decide how many blocks a request needs."""
    return shape.replace(capacity_blocks=0, max_num_seqs=0)


class GroupKey:
    """What the workers of a group have in common: the models they answer to and their token geometry.

    It tells a group from others; one that comes when its last worker has gone may be as it was. The hash is found once:
    a fleet of many groups is compared with what it was whenever a worker comes or goes.
    """

    __slots__ = ("_hash", "geometry", "models")

    def __init__(self, models: tuple[str, ...], geometry: EngineShape) -> None:
        """Take both."""
        self.models = models
        self.geometry = geometry
        self._hash = hash((models, geometry))

    def __eq__(self, other: object) -> bool:
        """Compare both."""
        if self is other:
            return True
        return isinstance(other, GroupKey) and self.models == other.models and self.geometry == other.geometry

    def __hash__(self) -> int:
        """Return what was found for both."""
        return self._hash


class Geometries:
    """The token geometries of the groups there are, each with a number as long as there is one of it."""

    def __init__(self) -> None:
        """Start with none."""
        self._numbers: dict[EngineShape, int] = {}
        self._groups: dict[int, int] = {}
        self._last = 0

    def __contains__(self, number: int) -> bool:
        """Return whether any group has the geometry of this number."""
        return number in self._groups

    def add(self, geometry: EngineShape) -> int:
        """Count one more group of it, and return its number."""
        number = self._numbers.get(geometry)
        if number is None:
            self._last += 1
            number = self._numbers[geometry] = self._last
        self._groups[number] = self._groups.get(number, 0) + 1
        return number

    def remove(self, geometry: EngineShape) -> None:
        """Count one group less."""
        number = self._numbers[geometry]
        self._groups[number] -= 1
        if not self._groups[number]:
            del self._groups[number], self._numbers[geometry]
