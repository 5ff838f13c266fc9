"""The prompts of one tokenizer process: those that wait here, and the few that have gone ahead to it.

What waits here can be forgotten. What has gone ahead keeps the process at work while its answers travel, and is known
by name if the process dies of it.

Shorter prompts pass longer ones: a hundred prompts of somebody's batch, each of them a second's work, would hold up
everybody's questions otherwise, and the engine with them. Those of about one length keep their order, and the oldest of
all is passed by no more characters than it has itself: no prompt waits for more than twice what it would in the order
in which they came.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple

MOST_AHEAD: Final = 128
"""Prompts that go ahead at most: 6 ms where the shortest take 50 µs, as with a fast tokenizer and its template."""

AHEAD_CHARACTERS: Final = 64 * 1024
"""Characters that go ahead at most, but for those of the last: 16 ms of a tokenizer that makes a million tokens a
second, of four characters each; a process answers every 4 ms. A prompt of so many goes ahead alone: those that come
meanwhile wait for the end of one such prompt and not of two, and the process for a millisecond between them."""

LEAST_CHARACTERS: Final = 256
"""What a prompt counts as at least where it passes another: the 50 µs of the shortest."""

ALIKE_CHARACTERS: Final = 4096
"""Prompts of fewer keep their order, as do those from here to twice as many, from there to four times, and so on."""


class _Prompt(NamedTuple):
    """A prompt and its length; a lower number came before."""

    number: int
    prompt: Any
    characters: int


class Culprit(NamedTuple):
    """The prompt that a process died of; not `wanted` if its run has ended meanwhile."""

    name: str
    wanted: bool


class PromptLine:
    """Prompts of which shorter ones go first; each is answered once, forgotten, or what its process died of."""

    def __init__(self) -> None:
        """Begin with none."""
        self._waiting: dict[int, OrderedDict[str, _Prompt]] = {}
        """By length, the shortest as 0: a line of those that keep their order, none without a prompt."""
        self._number = 0
        self._oldest = 0
        """Number of the prompt that `_passed_characters` have passed."""
        self._passed_characters = 0
        self._ahead: dict[str, _Prompt] = {}
        self._ahead_characters = 0
        self._unwanted: set[str] = set()
        """Those ahead that have been forgotten."""
        self.answered_count = 0
        """Prompts that the present process has answered."""
        self._began_none = False
        """Whether the process before it died with prompts that it had not begun, and of none."""

    @property
    def waits(self) -> bool:
        """Whether there is a prompt that has not gone ahead."""
        return len(self._waiting) > 0

    @property
    def is_ahead(self) -> bool:
        """Whether the process has a prompt to answer."""
        return len(self._ahead) > 0

    def __len__(self) -> int:
        """Return the number of prompts here and ahead."""
        return sum(map(len, self._waiting.values())) + len(self._ahead)

    def add(self, name: str, prompt: Any, characters: int) -> None:
        """Put a prompt behind those of its length."""
        self._number += 1
        self._line_of(characters)[name] = _Prompt(self._number, prompt, characters)

    def forget(self, name: str) -> None:
        """Drop a prompt that nobody waits for any more; one that has gone ahead is rendered in vain."""
        if name in self._ahead:
            self._unwanted.add(name)
            return
        for length, line in self._waiting.items():
            if line.pop(name, None) is not None:
                self._drop_empty(length)
                return

    def go_ahead(self) -> list[tuple[str, Any]]:
        """Return the prompts, by name, that are to be sent to the process now."""
        going: list[tuple[str, Any]] = []
        ahead, characters = self._ahead, self._ahead_characters
        while self._waiting and len(ahead) < MOST_AHEAD and characters < AHEAD_CHARACTERS:
            name, prompt = self._next()
            ahead[name] = prompt
            characters += prompt.characters
            going.append((name, prompt.prompt))
        self._ahead_characters = characters
        return going

    def _line_of(self, characters: int) -> OrderedDict[str, _Prompt]:
        return self._waiting.setdefault((characters // ALIKE_CHARACTERS).bit_length(), OrderedDict())

    def _drop_empty(self, length: int) -> None:
        if not self._waiting[length]:
            del self._waiting[length]

    def _next(self) -> tuple[str, _Prompt]:
        """Take out the first of the shortest, or the oldest of all if that one would pass it by too much."""
        waiting = self._waiting
        length = min(waiting)
        if len(waiting) > 1:
            firsts = {other: next(iter(line.values())) for other, line in waiting.items()}
            oldest_length = min(firsts, key=lambda other: firsts[other].number)
            if not self._may_pass(firsts[oldest_length], firsts[length]):
                length = oldest_length
        taken = waiting[length].popitem(last=False)
        self._drop_empty(length)
        return taken

    def _may_pass(self, oldest: _Prompt, other: _Prompt) -> bool:
        """Return whether `other` goes before the oldest prompt, and count that if it does."""
        if oldest.number != self._oldest:
            self._oldest, self._passed_characters = oldest.number, 0
        passing = max(other.characters, LEAST_CHARACTERS)
        if oldest.number == other.number or self._passed_characters + passing > oldest.characters:
            return False
        self._passed_characters += passing
        return True

    def answered(self, name: str) -> bool:
        """Take note of an answer; return whether it is wanted."""
        self.answered_count += 1
        self._ahead_characters -= self._ahead.pop(name).characters
        if not self._unwanted or name not in self._unwanted:
            return True
        self._unwanted.discard(name)
        return False

    def process_lost(self, begun: int) -> Culprit | None:
        """Begin anew with another process, after one that had begun to render so many prompts.

        Return what it died of: the last that it had begun and not answered; None if it had begun none, as one that is
        killed at rest. The others wait again, before those of their length that have not been ahead.
        """
        ahead = list(self._ahead.items())
        number = min(self._number_of(begun - self.answered_count), len(ahead))
        culprit = None
        for position in range(len(ahead), 0, -1):
            name, prompt = ahead[position - 1]
            wanted = name not in self._unwanted
            if position == number:
                culprit = Culprit(name, wanted)
            elif wanted:
                line = self._line_of(prompt.characters)
                line[name] = prompt
                line.move_to_end(name, last=False)
        self._began_none = bool(ahead) and not number
        self._ahead.clear()
        self._unwanted.clear()
        self._ahead_characters = self.answered_count = 0
        return culprit

    def _number_of(self, begun: int) -> int:
        """Return which of those ahead a process died of, 0 for none, that had begun so many of them.

        A second process that dies before it begins what it has been sent dies of that: it must not go on for ever.
        """
        if begun > 0:
            return begun
        return int(self._began_none and not self.answered_count)
