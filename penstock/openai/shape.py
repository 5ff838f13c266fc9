"""What of a body decides how its answer is written, small enough to travel with the request.

The queue keeps a request's `client_reference` and returns it with the result, so that an answer can be written in the
asker's shape by someone who never saw the body, after any restart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from penstock.openai.bodies import ChatBody, CompletionBody

MARK = "openai/1 "
"""What the references written here begin with; other text in a `client_reference` is somebody else's."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an answer is written."""

    chat: bool = False
    role: str = ""
    """Of the answering message (chats only)."""
    logprobs: int | None = None
    """Likely tokens to show at each position, -1 for all that came; None shows no log probabilities."""
    prompt_logprobs: bool = False
    tokens_as_ids: bool = False
    echo: bool = False

    @classmethod
    def of(cls, body: ChatBody | CompletionBody) -> Shape:
        """Return the shape that `body` asks for."""
        as_ids = bool(body.return_tokens_as_token_ids)
        asked = body.prompt_logprobs is not None
        if isinstance(body, ChatBody):
            top = (body.top_logprobs or 0) if body.logprobs else None
            return cls(True, body.answer_role, top, asked, as_ids)
        echo = bool(body.echo)
        return cls(False, "", body.logprobs, asked or echo, as_ids, echo)

    def to_reference(self) -> str:
        """Return the shape as the text of a `client_reference`."""
        return MARK + json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_reference(cls, text: str) -> Shape:
        """Return the shape written by `to_reference`; a plain completion's if `text` is something else.

        What follows the first line is the writer's own.
        """
        if not text.startswith(MARK):
            return cls()
        try:
            return cls(**json.loads(text[len(MARK) :].partition("\n")[0]))
        except (ValueError, TypeError):
            return cls()
