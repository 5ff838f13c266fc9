"""How many tokens a prompt has, before it is tokenized: from its bytes, and from the prompts that were.

Tokens are taken for a line over bytes: a tokenizer, or a chat's template, puts a number of tokens before any text,
and the text has so many for each byte. The line is fitted by least squares; a prompt weighs by one over its bytes, so
that the short ones say what comes before the text and the long ones how dense it is. How far prompts lie off the line
is measured as a share of their bytes, and counted by their bytes: what language and code do to a prompt grows with it,
and two tokens of one letter are no sign that pages of text have twice the tokens that they had so far.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from services.scheduler.core.messages import Announced

LEAST_PROMPTS: Final = 8
"""Prompts whose sizes must be known before one is predicted from them."""

FIRST_TOKENS_PER_BYTE: Final = 1
"""What is guessed before: no tokenizer in use makes more tokens than bytes, most make a quarter as many. To take a
prompt for the whole window instead would let requests in one by one where the pool is hardly larger."""

FIRST_TEMPLATE_TOKENS: Final = 64
"""What a chat's template is guessed to add."""

PROMPT_MEMORY: Final = 256
"""Prompts over which the sums are averaged."""

PROMPT_DEVIATIONS: Final = 2.0
"""Deviations above the line at which a prompt is booked: a booking too small by a block or two is made good
by the tokenizer ACK some milliseconds later."""

MOST_MODELS: Final = 4096
"""Lines kept, so that model names that come and go cannot fill memory."""

ALIKE: Final = 1e-9
"""Prompts that differ by less in size, in parts of it, show no slope: they are all told to be proportional."""


class Line:
    """Tokens over bytes: running means over some prompts, the line through them, and how far they lie off it."""

    __slots__ = ("_bytes", "_inverse", "_off", "_ratio", "_tokens", "before", "deviation", "per_byte", "seen")

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.seen = 0
        self.before = self.per_byte = self.deviation = 0.0
        self._bytes = self._tokens = self._inverse = self._ratio = self._off = 0.0

    def observe(self, size: int, tokens: int) -> None:
        """Take a prompt of `size` bytes."""
        self.seen += 1
        share = 1 / min(self.seen, PROMPT_MEMORY)
        self._bytes += share * (size - self._bytes)
        self._tokens += share * (tokens - self._tokens)
        self._inverse += share * (1 / size - self._inverse)
        self._ratio += share * (tokens / size - self._ratio)
        self._fit()
        off = tokens - self.before - self.per_byte * size
        self._off += share * (off * off / size - self._off)
        self.deviation = sqrt(self._off / self._bytes)

    def booked_tokens(self, size: int) -> float:
        """Return the tokens that hardly any prompt of so many bytes exceeds."""
        return self.before + size * (self.per_byte + PROMPT_DEVIATIONS * self.deviation)

    def _fit(self) -> None:
        """Minimize the sum of (tokens - before - per_byte * bytes)^2 / bytes; neither of the two is negative."""
        spread = self._inverse * self._bytes - 1
        before = (self._bytes * self._ratio - self._tokens) / spread if spread > ALIKE else 0.0
        self.before = min(max(before, 0.0), self._tokens)
        self.per_byte = (self._tokens - self.before) / self._bytes


class PromptSizes:
    """The line of the prompts seen so far, by model and by whether they are chats."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._lines: dict[tuple[str, bool], Line] = {}

    def observe(self, model: str, request: Announced, prompt_tokens: int) -> bool:
        """Note the length of a tokenized prompt; return whether it is the last that was missing for predictions."""
        if not request.prompt_bytes or not prompt_tokens:
            return False
        key = model, request.chat
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= MOST_MODELS:
                self._lines.clear()
            line = self._lines[key] = Line()
        line.observe(request.prompt_bytes, prompt_tokens)
        return line.seen == LEAST_PROMPTS

    def predict(self, model: str, request: Announced, bound_tokens: int) -> int:
        """Return the tokens to expect of a prompt that cannot exceed `bound_tokens`."""
        if request.prompt_tokens or not request.prompt_bytes:
            return bound_tokens
        line = self._lines.get((model, request.chat))
        if line is None or line.seen < LEAST_PROMPTS:
            expected = float(request.prompt_bytes * FIRST_TOKENS_PER_BYTE + FIRST_TEMPLATE_TOKENS)
        else:
            expected = line.booked_tokens(request.prompt_bytes)
        return max(min(int(expected) + 1, bound_tokens), 1)
