"""Channels that always have requests waiting."""

from __future__ import annotations

from tests.support.timeline import Call, Timeline


class Flood:
    """Keeps requests of each kind waiting, and counts what is granted."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.asked: dict[tuple[str, str], list[str]] = {}

    def advance(self, *calls: tuple[Call, int]) -> None:
        """Announce each call until so many of its channel and model wait, and let a step pass."""
        wanted: list[Call] = []
        for call, least in calls:
            asked = self.asked.setdefault((call.channel, call.model), [])
            for _ in range(least - sum(name not in self.timeline.granted_at for name in asked[-least:])):
                asked.append(f"{call.channel}-{len(self.timeline.calls) + len(wanted)}")
                wanted.append(call)
        self.timeline.advance(wanted)

    def granted(self, channel: str, model: str, since: int = 0) -> int:
        """Return how many requests have been granted from a step on."""
        at = self.timeline.granted_at
        return sum(at.get(name, -1) >= since for name in self.asked.get((channel, model), ()))

    def longest_wait(self, channel: str, model: str) -> int:
        """Return for how many steps one has waited."""
        timeline = self.timeline
        return max(
            timeline.granted_at.get(name, timeline.step) - timeline.calls[name].step
            for name in self.asked[channel, model]
        )
