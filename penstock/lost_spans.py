"""How many spans no collector got: counted apart from their export, so that who exports none imports none of that."""

from __future__ import annotations

import threading


class Losses:
    """Counts spans that no collector got, whichever thread finds out."""

    def __init__(self, total: Losses | None = None) -> None:
        """Begin at 0; count in `total` as well."""
        self.spans = 0
        self._total = total
        self._mutex = threading.Lock()

    def add(self, spans: int) -> None:
        """Count so many more."""
        with self._mutex:
            self.spans += spans
        if self._total is not None:
            self._total.add(spans)


LOST = Losses()
"""Of the whole process since its start; a service's metric."""
