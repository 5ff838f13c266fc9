"""Ends answers that are being given to a client whose key is no longer good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.client import Client
from penstock.credentials import pass_on
from penstock.errors import PenstockError, Unauthenticated
from services.rpc.interruption import Interruption

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two rounds of questions: with the 0.5 s in which the queue notices a changed keys file, a revocation is late
by about 1.5 s. A round asks about every key that is being answered once, one after the other, whatever their number of
answers, so that all keys together never have more than one call under way."""


class Vigil:
    """Asks the queue about the keys of those who are being answered.

    Their answers do not come over calls of their own that the queue could end: a gateway follows all its clients'
    requests in one stream, and reads files for their tenants.
    """

    def __init__(self, client: Client | None = None, look_s: float = LOOK_S) -> None:
        """Ask through `client`, every `look_s` seconds. None: there are no keys, and nothing is asked."""
        self._client = client
        self._look_s = look_s
        self._answered: dict[str, set[Interruption]] = {}
        """What ends each answer, by the Authorization header that it was asked for with."""
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def over(self, authorization: str) -> Iterator[None]:
        """Run the body of the `with`; raises Unauthenticated out of it once the client's key is not good any more."""
        if self._client is None or not authorization:
            yield
            return
        with Interruption() as interruption:
            answers = self._answered.setdefault(authorization, set())
            answers.add(interruption)
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(self._client), name="vigil")
            try:
                yield
            finally:
                answers.discard(interruption)
                if not answers:
                    del self._answered[authorization]

    async def close(self) -> None:
        """Ask nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, client: Client) -> None:
        """Go round until nobody is being answered."""
        while self._answered:
            await asyncio.sleep(self._look_s)
            for authorization in list(self._answered):
                if not await _good(client, authorization):
                    self._end(authorization)

    def _end(self, authorization: str) -> None:
        answers = self._answered.get(authorization, ())
        ended = [one.end(Unauthenticated("the API key is no longer good for this answer")) for one in answers]
        log.info("a key is no longer good: %d answers end", sum(ended))


async def _good(client: Client, authorization: str) -> bool:
    """Whether the queue knows the key; also if it cannot be asked: its being away has its own consequences."""
    pass_on(authorization)
    try:
        await client.identify()
    except Unauthenticated:
        return False
    except PenstockError:
        return True
    return True
