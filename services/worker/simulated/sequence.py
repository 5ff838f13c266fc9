"""One completion in the simulated engine, and what one of its steps did."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

from services.worker.simulated.blocks import KeyedBlock


class Clock:
    """Steps an engine has made; every decoding sequence's output length follows from it."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        """Start at step 0."""
        self.steps = 0


class Sequence:
    """One completion: `prompt_tokens` in, `output_tokens` out, which the scheduler never looks at.

    `prefix_keys` are the keys of its prompt's full blocks (`prompt_keys`); without them nobody shares its prompt.
    Everything else is the engine's.
    """

    __slots__ = (
        "_base",
        "_clock",
        "_computed",
        "_generated",
        "blocks",
        "cached_tokens",
        "key",
        "lost",
        "output_tokens",
        "preemptions",
        "prefix_keys",
        "priority",
        "prompt_tokens",
        "recomputed_tokens",
        "serial",
        "shared",
    )

    def __init__(
        self, key: str, prompt_tokens: int, output_tokens: int, prefix_keys: List[int] = (), priority: int = 0
    ) -> None:
        """Describe a completion; `output_tokens` is at least 1 and includes the end-of-sequence token.

        Of a lower `priority` it goes first, in an engine that looks at that.
        """
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix_keys = prefix_keys
        self.priority = priority
        self.serial = 0
        self.blocks = 0
        """Blocks held, shared ones included."""
        self.shared: list[KeyedBlock] = []
        """Those of the held blocks that have keys: always the first ones."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache when it was first admitted."""
        self.preemptions = 0
        self.lost = 0
        """Tokens whose KV entries preemptions threw away: as many as there ever were."""
        self.recomputed_tokens = 0
        self._generated = 0
        self._computed = 0
        self._clock: Clock | None = None
        self._base = 0

    @property
    def decoding(self) -> bool:
        """Whether the prompt (after a preemption: the output so far, too) is computed."""
        return self._clock is not None

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return self._generated if self._clock is None else self._clock.steps - self._base

    @property
    def computed(self) -> int:
        """Tokens whose KV entries exist: while decoding, all but the one sampled last."""
        return self._computed if self._clock is None else self.prompt_tokens + self._clock.steps - self._base - 1

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return self.prompt_tokens + self.generated

    def begin_prefill(self, computed: int) -> None:
        """Run from `computed` tokens found in the cache."""
        self._computed = computed
        if not self.preemptions:
            self.cached_tokens = computed

    def prefill(self, chunk: int) -> None:
        """Compute `chunk` more tokens of what is known."""
        self._computed += chunk

    def begin_decode(self, clock: Clock) -> None:
        """Follow `clock`, which has just counted the step of the next output token."""
        self._base = clock.steps - self._generated - 1
        self._clock = clock

    def skip_step(self) -> None:
        """Miss one step of the clock."""
        self._base += 1

    def stop(self) -> None:
        """Hold nothing any more; what was generated stays."""
        self._generated = self.generated
        self._clock = None
        self._computed = 0

    def due_phase(self, block_size: int) -> int:
        """Return the steps, modulo the block size, at whose start a decoding sequence needs a block.

        That is when its computed tokens, prompt + steps - base - 1, are a multiple of the block size.
        """
        return (1 + self._base - self.prompt_tokens) % block_size

    def end_step(self) -> int:
        """Return the step after which a decoding sequence has its whole output."""
        return self._base + self.output_tokens


class StepResult(NamedTuple):
    """What one step did.

    A profile turns the five numbers of load into seconds. Lists hold sequences in the order in which it happened.
    """

    decoding: int
    """Sequences that computed one token after their last."""
    prefill_tokens: int
    """Tokens of prompts computed, recomputed ones included."""
    prefills: int
    """Sequences they belong to."""
    kv_tokens_read: int
    """Context of each scheduled sequence, its tokens of this step included: KV entries read at least once."""
    attended_tokens: int
    """Sum over the computed tokens of the context each attends to: arithmetic of the attention."""
    recomputed_tokens: int
    """Those of the prefill tokens that had been computed before a preemption."""
    cached_tokens: int
    """Tokens that admitted sequences found in the prefix cache."""
    admitted: list[Sequence]
    """Sequences that left the waiting line, after a preemption too (`preemptions > 0`)."""
    preempted: list[Sequence]
    first: list[Sequence]
    """Sequences that got their first token."""
    sampled: list[Sequence]
    """Sequences that got a token."""
    ended: list[Sequence]
    """Sequences that got their last token and left."""

    @property
    def computed_tokens(self) -> int:
        """Tokens computed."""
        return self.decoding + self.prefill_tokens
