"""What workers offer: credits that stand ready for requests that are yet to come.

The scheduler grants them while nothing waits. A request that meets an offer is on its way to its worker in the step
in which it is stored, without having been announced, granted and claimed.
"""

from __future__ import annotations

from collections.abc import Callable

from services.queue.core.entry import RequestMeta
from services.queue.core.messages import Offer

MOST_OF_A_STREAM = 16
"""Offers of one worker at once, several times what a scheduler gives: a peer can make the queue remember no more."""


class Offers:
    """Offers by what they are for, those that have stood longest first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_kind: dict[tuple[str, str, bool], dict[tuple[int, str], Offer]] = {}
        self._kinds: dict[tuple[int, str], tuple[str, str, bool]] = {}

    def __len__(self) -> int:
        """Return the number of offers."""
        return len(self._kinds)

    def add(self, offer: Offer) -> bool:
        """Keep an offer, in the place of one of the same name; False if its stream has as many as it may have."""
        name = offer.stream, offer.grant
        self._remove(name)
        if sum(stream == offer.stream for stream, _ in self._kinds) >= MOST_OF_A_STREAM:
            return False
        self._kinds[name] = kind = offer.channel, offer.model, offer.chat
        self._by_kind.setdefault(kind, {})[name] = offer
        return True

    def withdraw(self, stream: int, grant: str) -> bool:
        """Forget an offer; return whether there was one."""
        return self._remove((stream, grant)) is not None

    def drop(self, stream: int) -> None:
        """Forget all offers of a stream."""
        for name in [name for name in self._kinds if name[0] == stream]:
            self._remove(name)

    def take(self, meta: RequestMeta, has_room: Callable[[int], bool]) -> Offer | None:
        """Take the first offer that the request fits and whose stream `has_room`; None if there is none."""
        offers = self._by_kind.get((meta.channel, meta.model, meta.chat), {})
        found = next((offer for offer in offers.values() if fits(meta, offer) and has_room(offer.stream)), None)
        return None if found is None else self._remove((found.stream, found.grant))

    def _remove(self, name: tuple[int, str]) -> Offer | None:
        kind = self._kinds.pop(name, None)
        if kind is None:
            return None
        offers = self._by_kind[kind]
        offer = offers.pop(name)
        if not offers:
            del self._by_kind[kind]
        return offer


def fits(meta: RequestMeta, offer: Offer) -> bool:
    """Return whether a request is no larger than what is offered."""
    return (
        meta.n <= 1
        and meta.prompt_bytes <= offer.most_prompt_bytes
        and meta.prompt_tokens <= offer.most_prompt_tokens
        and meta.max_tokens <= offer.most_output_tokens
        # What one request tells bounds nothing of one that does not tell it.
        and (meta.prompt_bytes > 0) == (offer.most_prompt_bytes > 0)
        and (meta.prompt_tokens > 0) == (offer.most_prompt_tokens > 0)
        and (meta.max_tokens > 0) == (offer.most_output_tokens > 0)
    )
