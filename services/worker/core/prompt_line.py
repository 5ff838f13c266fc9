"""The prompts of one tokenizer process: those that wait here, and the few that have gone ahead to it.

What waits here can be forgotten. What has gone ahead keeps the process at work while its answers travel, and is known
by name if the process dies of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple

MOST_AHEAD: Final = 128
"""Prompts that go ahead at most: 6 ms where the shortest take 50 µs, as with a fast tokenizer and its template."""

AHEAD_CHARACTERS: Final = 64 * 1024
"""Characters that go ahead at most: 16 ms of a tokenizer that makes a million tokens a second, of four characters
each; a process answers every 4 ms."""

LEAST_AHEAD: Final = 2
"""Prompts that go ahead however long they are, so that there is one to render while the answer to another travels."""


class Culprit(NamedTuple):
    """The prompt that a process died of; not `wanted` if its run has ended meanwhile."""

    name: str
    wanted: bool


class PromptLine:
    """Prompts in the order in which they came; each is answered once, forgotten, or what its process died of."""

    def __init__(self) -> None:
        """Begin with none."""
        self._waiting: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        """Each with its number of characters."""
        self._ahead: dict[str, tuple[Any, int]] = {}
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
        return len(self._waiting) + len(self._ahead)

    def add(self, name: str, prompt: Any, characters: int) -> None:
        """Put a prompt at the end."""
        self._waiting[name] = (prompt, characters)

    def forget(self, name: str) -> None:
        """Drop a prompt that nobody waits for any more; one that has gone ahead is rendered in vain."""
        if name in self._ahead:
            self._unwanted.add(name)
        else:
            self._waiting.pop(name, None)

    def go_ahead(self) -> list[tuple[str, Any]]:
        """Return the prompts, by name, that are to be sent to the process now."""
        going: list[tuple[str, Any]] = []
        waiting, ahead, characters = self._waiting, self._ahead, self._ahead_characters
        while waiting:
            count = len(ahead)
            if count >= LEAST_AHEAD and (count >= MOST_AHEAD or characters >= AHEAD_CHARACTERS):
                break
            name, prompt = waiting.popitem(last=False)
            ahead[name] = prompt
            characters += prompt[1]
            going.append((name, prompt[0]))
        self._ahead_characters = characters
        return going

    def answered(self, name: str) -> bool:
        """Take note of an answer; return whether it is wanted."""
        self.answered_count += 1
        self._ahead_characters -= self._ahead.pop(name)[1]
        if not self._unwanted or name not in self._unwanted:
            return True
        self._unwanted.discard(name)
        return False

    def process_lost(self, begun: int) -> Culprit | None:
        """Begin anew with another process, after one that had begun to render so many prompts.

        Return what it died of: the last that it had begun and not answered; None if it had begun none, as one that is
        killed at rest. The others wait again, before those that have not been ahead.
        """
        ahead = list(self._ahead.items())
        number = min(self._number(begun - self.answered_count), len(ahead))
        culprit = None
        for position in range(len(ahead), 0, -1):
            name, prompt = ahead[position - 1]
            wanted = name not in self._unwanted
            if position == number:
                culprit = Culprit(name, wanted)
            elif wanted:
                self._waiting[name] = prompt
                self._waiting.move_to_end(name, last=False)
        self._began_none = bool(ahead) and not number
        self._ahead.clear()
        self._unwanted.clear()
        self._ahead_characters = self.answered_count = 0
        return culprit

    def _number(self, begun: int) -> int:
        """Return which of those ahead a process died of, 0 for none, that had begun so many of them.

        A second process that dies before it begins what it has been sent dies of that: it must not go on for ever.
        """
        if begun > 0:
            return begun
        return int(self._began_none and not self.answered_count)
