"""Looks at a fleet again and again: each reading, and what it says with those before it."""

from __future__ import annotations

from penstock.client import Client
from penstock.live.departed import Departures
from penstock.live.history import STEP_S, History
from penstock.live.rates import Rates
from penstock.live.reader import ANSWER_S, take
from penstock.live.reading import Reading
from penstock.live.view import View, view_of


class Watcher:
    """The latest reading and its frame, and what the ones before leave behind: rates, who has gone, KV usage."""

    def __init__(self, client: Client, answer_s: float = ANSWER_S, step_s: float = STEP_S) -> None:
        """Read through `client`; wait `answer_s` for an answer, keep samples of KV usage `step_s` apart (seconds)."""
        self._client = client
        self._answer_s = answer_s
        self._rates = Rates()
        self._departures = Departures()
        self.history = History(step_s=step_s)
        self.reading = Reading(0.0, None, None, ())
        self.view = view_of(self.reading, {})

    async def look(self) -> View:
        """Take a reading and return its frame."""
        reading = self.reading = await take(self._client, self._answer_s)
        self.view = view_of(reading, self._rates.take(reading), self._departures.take(reading))
        self.history.add(reading.at_s, {worker.name: worker.kv_usage for worker in self.view.workers})
        return self.view
