"""What of a body decides how its answer is written, small enough to travel with the request.

The queue keeps a request's `client_reference` and returns it with the result, so that an answer can be written in the
asker's shape by someone who never saw the body, after any restart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from penstock.openai.bodies import ChatBody, CompletionBody
from penstock.openai.spelling import spellings_of

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
    names: Mapping[str, str] = field(default_factory=dict)
    """What the body calls fields that another one may call otherwise (`spellings_of`)."""

    @property
    def spellings(self) -> Mapping[str, str]:
        """What errors call fields of the request: what the body does."""
        return {"prompt": "messages", **self.names} if self.chat else self.names

    @classmethod
    def of(cls, body: ChatBody | CompletionBody) -> Shape:
        """Return the shape that `body` asks for."""
        as_ids = bool(body.return_tokens_as_token_ids)
        asked = body.prompt_logprobs is not None
        names = spellings_of(body)
        if isinstance(body, ChatBody):
            top = (body.top_logprobs or 0) if body.logprobs else None
            return cls(True, body.answer_role, top, asked, as_ids, names=names)
        echo = bool(body.echo)
        return cls(False, "", body.logprobs, asked or echo, as_ids, echo, names)

    def to_reference(self) -> str:
        """Return the shape as the text of a `client_reference`."""
        told = asdict(self)
        if not self.names:
            del told["names"]  # which earlier programs do not know
        return MARK + json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_reference(cls, text: str) -> Shape:
        """Return the shape written by `to_reference`; a plain completion's if `text` is something else.

        What a later program says of it besides is left out. What follows the first line is the writer's own.
        """
        if not text.startswith(MARK):
            return cls()
        try:
            told = json.loads(text[len(MARK) :].partition("\n")[0])
            names = {name: spelt for name, spelt in told.pop("names", {}).items() if isinstance(spelt, str)}
            known = {one.name for one in fields(cls)}
            return cls(**{name: value for name, value in told.items() if name in known}, names=names)
        except (ValueError, TypeError, AttributeError):
            return cls()
