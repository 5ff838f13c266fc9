"""Standing grants: credits given before there is a request for them.

While nothing waits, a request that comes would be announced, granted, claimed and delivered: four messages, each of
which waits for a process to wake up. Instead the scheduler keeps one grant standing for each kind of request that came
lately. Its worker offers it to the queue, which delivers the next request of that kind at once; the worker then says
whose the grant is. Credits that are advertised before they are asked for are how links do it (Kung, Blackwell and
Chapman, "Credit-Based Flow Control for ATM Networks", SIGCOMM '94).

They are for what is free and nobody wants: none is given while anything waits or has waited a moment ago, each is at
most a share of what is free on its worker, and all are recalled as soon as a request waits, or when they have stood
unused for a while. Nothing is charged for one until it is used.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.core.value import Value
from services.scheduler.core.messages import Announced

PREFIX: Final = "standing/"
"""Names of standing grants begin with this, which no request's name does."""

MOST_KINDS: Final = 4
"""Kinds of requests that have a grant standing at once: those that came last."""

CALM_NS: Final = 20_000_000
"""How long nothing must have waited: a request that waits for room is followed by others."""

RETURNED_PAUSE_NS: Final = 1_000_000_000
"""A worker that hands one back unasked cannot offer it: giving it another at once would only spin."""

FREE_PER_GRANT: Final = 4
"""All that stands on a worker is at most this part of what would be free without it, of blocks and of sequences, so
that nearly everything that comes finds room beside it."""

WEIGHT: Final = 4
"""The last prompt counts for one part in so many of what the next grant is for."""

OUTPUT_WEIGHT: Final = 16
"""The largest output asked for of late loses one part in so many with each request. Where limits are drawn from a
range, the largest of the last dozen is near its upper end; half of them are larger than the last one."""

LOOKS: Final = 64
"""Lines that are searched for somebody who waits."""

WORKER_LOOKS: Final = 8
"""Workers of a group that are asked for room, the roomiest first: each request that meets a grant pays for the next."""

ROOMIER: Final = 2
"""One that stands unused on a worker is recalled when another has more than so many times its room."""


class Kind(NamedTuple):
    """What a standing grant is for. What tells nothing of one request bounds another: these are of different kinds."""

    channel: str
    model: str
    chat: bool
    sized: bool
    """Whether the prompt's bytes are known."""
    counted: bool
    """Whether the number of prompt tokens is known. Of ids that the worker is to truncate neither is."""
    limited: bool
    """Whether a number of output tokens is asked for."""

    def has(self, request: Announced) -> bool:
        """Return whether the request is of this kind."""
        return (
            self.channel == request.channel
            and self.model == request.model
            and self.chat == request.chat
            and self.sized == (request.prompt_bytes > 0)
            and self.counted == (request.prompt_tokens > 0)
            and self.limited == (request.max_tokens > 0)
        )


def kind_of(request: Announced) -> Kind:
    """Return the kind of a request."""
    known = request.prompt_bytes > 0, request.prompt_tokens > 0, request.max_tokens > 0
    return Kind(request.channel, request.model, request.chat, *known)


class Most(Value):
    """The largest request, of its kind, that one is for."""

    def __init__(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        self.prompt_bytes, self.prompt_tokens, self.output_tokens = prompt_bytes, prompt_tokens, output_tokens

    def admits(self, request: Announced) -> bool:
        """Return whether the request, of the same kind, is no larger."""
        return (
            request.prompt_bytes <= self.prompt_bytes
            and request.prompt_tokens <= self.prompt_tokens
            and request.max_tokens <= self.output_tokens
        )

    def within(self, window_tokens: int) -> Most:
        """Return the largest of these that a window of so many tokens may run: one is left for output."""
        return self.replace(prompt_tokens=min(self.prompt_tokens, window_tokens - 1))

    def after(self, request: Announced) -> Most:
        """Return what the next one should admit: twice the prompts of late, on average, and the outputs of late."""
        return Most(
            self.prompt_bytes + (2 * request.prompt_bytes - self.prompt_bytes) // WEIGHT,
            self.prompt_tokens + (2 * request.prompt_tokens - self.prompt_tokens) // WEIGHT,
            max(request.max_tokens, self.output_tokens - self.output_tokens // OUTPUT_WEIGHT),
        )

    def rounded(self) -> Most:
        """Return these with the output up to the next power of two, as many limits are: below it all are alike."""
        return self.replace(output_tokens=1 << (self.output_tokens - 1).bit_length() if self.output_tokens else 0)


def twice(request: Announced) -> Most:
    """Return what admits requests of up to twice the prompt."""
    return Most(2 * request.prompt_bytes, 2 * request.prompt_tokens, request.max_tokens)


class Wanted:
    """What should stand for a kind, when a request of the kind came last, and when to look for room again."""

    def __init__(self, kind: Kind, most: Most, came_ns: int) -> None:
        """Look for room at once."""
        self.kind = kind
        self.most = most
        self.came_ns = came_ns
        self.look_ns = 0


class Given(Value):
    """A standing grant that is out."""

    def __init__(self, epoch: int, kind: Kind, most: Most, since_ns: int) -> None:
        self.epoch, self.kind, self.most, self.since_ns = epoch, kind, most, since_ns


class Standing:
    """Which standing grants are wanted and which are out. Owns no credits: those are in the ledgers, by name."""

    def __init__(self, lifetime_ns: int) -> None:
        """Keep each for so long unused; 0 gives none."""
        self._lifetime_ns = lifetime_ns
        self._wanted: list[Wanted] = []
        """For each kind that came lately, the one that came last at the end."""
        self._given: dict[str, Given] = {}
        self._recalled: set[str] = set()
        self._calm_from_ns = 0
        self._last = 0

    @property
    def in_use(self) -> bool:
        """Whether anything is out, or wanted."""
        return bool(self._wanted or self._given)

    # ---- what is wanted ----

    def came(self, request: Announced, now_ns: int) -> list[tuple[int, str]]:
        """Note that a request was granted; return those to recall, (epoch, name).

        It did not fit them, and would fit what is given next.
        """
        if not self._lifetime_ns or request.n > 1:
            return []
        wanted = self._came_last(request, now_ns)
        dropped = self._wanted.pop(0).kind if len(self._wanted) > MOST_KINDS else None
        if not self._given:
            return []
        next_admits = wanted.most.admits(request)
        return self._recall(
            [
                name
                for name, given in self._given.items()
                if given.kind == dropped
                or (next_admits and given.kind == wanted.kind and not given.most.admits(request))
            ]
        )

    def _came_last(self, request: Announced, now_ns: int) -> Wanted:
        """Return what is wanted for the request's kind after it, at the end of those wanted from now on."""
        for index, wanted in enumerate(self._wanted):
            if wanted.kind.has(request):
                wanted.most = wanted.most.after(request)
                wanted.came_ns = now_ns
                if index < len(self._wanted) - 1:
                    self._wanted.append(self._wanted.pop(index))
                return wanted
        wanted = Wanted(kind_of(request), twice(request), now_ns)
        self._wanted.append(wanted)
        return wanted

    def missing(self, now_ns: int) -> list[tuple[Kind, Most]]:
        """Return the kinds that should have one and have none, as many as may still be given."""
        while self._wanted and now_ns - self._wanted[0].came_ns >= self._lifetime_ns:
            self._wanted.pop(0)
        if not self._wanted or now_ns < self._calm_from_ns:
            return []
        out = {given.kind for given in self._given.values()}
        kinds = [
            (wanted.kind, wanted.most.rounded())
            for wanted in reversed(self._wanted)
            if wanted.kind not in out and now_ns >= wanted.look_ns
        ]
        return kinds[: max(MOST_KINDS - len(self._given), 0)]

    def nowhere(self, kind: Kind, now_ns: int) -> None:
        """Note that there is no room for one: looking again at every wake-up would cost more than it brings."""
        for wanted in self._wanted:
            if wanted.kind == kind:
                wanted.look_ns = now_ns + CALM_NS

    def waits(self, now_ns: int) -> list[tuple[int, str]]:
        """Note that a request waits; return all that are out, to be recalled."""
        self._calm_from_ns = max(self._calm_from_ns, now_ns + CALM_NS)
        return self._recall(list(self._given)) if self._given else []

    # ---- what is out ----

    def give(self, epoch: int, kind: Kind, most: Most, now_ns: int) -> str:
        """Name a grant that is given now."""
        self._last += 1
        name = f"{PREFIX}{epoch}-{self._last}"
        self._given[name] = Given(epoch, kind, most, now_ns)
        return name

    def on(self, epoch: int) -> list[str]:
        """Return the names of those that are out on a worker."""
        return [name for name, given in self._given.items() if given.epoch == epoch]

    def ended(self, name: str) -> bool:
        """Note that a grant has its request or came home; return whether it was out and nobody had recalled it."""
        unasked = self._given.pop(name, None) is not None and name not in self._recalled
        self._recalled.discard(name)
        return unasked

    def out(self) -> list[tuple[str, Given]]:
        """Return those that are out and may stand on, by name."""
        return [(name, given) for name, given in self._given.items() if name not in self._recalled]

    def misplaced(self, name: str) -> list[tuple[int, str]]:
        """Note that one should stand elsewhere; return it, to be recalled."""
        return self._recall([name])

    def closed(self, epoch: int) -> None:
        """Forget those of an epoch: its worker will say what has become of them."""
        for name in self.on(epoch):
            self.ended(name)

    def unused(self, now_ns: int) -> list[tuple[int, str]]:
        """Return those to recall because nobody has used them for long; their kinds are wanted no more by then."""
        return self._recall(
            [name for name, given in self._given.items() if now_ns - given.since_ns >= self._lifetime_ns]
        )

    def _recall(self, names: list[str]) -> list[tuple[int, str]]:
        fresh = [name for name in names if name not in self._recalled]
        self._recalled.update(fresh)
        return [(self._given[name].epoch, name) for name in fresh]


def template(name: str, kind: Kind, most: Most) -> Announced:
    """Return the largest request that a standing grant is for."""
    return Announced(
        request_id=name,
        channel=kind.channel,
        priority=0,
        position=0,
        attempt=0,
        model=kind.model,
        prompt_bytes=most.prompt_bytes,
        prompt_tokens=most.prompt_tokens,
        max_tokens=most.output_tokens,
        n=1,
        chat=kind.chat,
    )
