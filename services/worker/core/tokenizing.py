"""What passes between the session and the tokenizer."""

from __future__ import annotations

from typing import NamedTuple

from services.core.value import Value


class Tokenized(Value):
    """The prompt's length in tokens."""

    def __init__(self, run_id: str, prompt_tokens: int) -> None:
        self.run_id, self.prompt_tokens = run_id, prompt_tokens


class TokenizeFailed(NamedTuple):
    """The prompt was not rendered: never will be if `rejected`, else the attempt failed (its process died of it)."""

    run_id: str
    code: str
    message: str
    param: str
    rejected: bool = True


class TokenizerDied(NamedTuple):
    """Nothing can be rendered any more; what is in the engine is unharmed."""

    reason: str


class Tokenize(Value):
    """Render and count the prompt of a run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class DropPrompt(Value):
    """Do not render the prompt of a run after all; an answer that is on its way is ignored."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
