"""What a run has generated so far, and the result made of it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineStep, Part, TokenProbability
from services.worker.told import joined

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
    "repetition": pb.FINISH_REASON_REPETITION,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


LEAST_ENTRY_BYTES = 15
"""Of a log probability among a token's likeliest: 2 before it, 2 for an id, 9 for the number and 2 for the rank."""


def least_prompt_logprobs(tokens: int, top: int) -> int:
    """Return the bytes that a result has at least of a prompt of `tokens`, with the `top` likeliest of each but one.

    The token's own entry and one of the likeliest count for nothing: of a certain one the number, 0, is not written.
    """
    return max(0, tokens - 1) * max(0, top - 1) * LEAST_ENTRY_BYTES


class ChoiceOutput:
    """Output of one completion; `told_*` is how much of it a watcher has been sent."""

    __slots__ = (
        "finish_reason", "logprobs", "message", "parts", "reasoning_tokens", "stop_reason", "texts", "token_ids",
        "told_parts", "told_texts", "told_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        """Begin empty."""
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenProbability] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.parts: list[Part] = []
        self.message: pb.ToolMessage | None = None
        self.reasoning_tokens: int | None = None
        self.told_tokens = 0
        self.told_texts = 0
        self.told_parts = 0


class RunOutput:
    """Everything a run has generated."""

    __slots__ = ("_as_message", "cached_tokens", "choices", "preemptions", "prompt_logprobs")

    def __init__(self, as_message: bool = False) -> None:
        """Begin empty. `as_message` says whether watchers are to be shown a message, and not the text."""
        self._as_message = as_message
        self.choices: dict[int, ChoiceOutput] = {}
        self.prompt_logprobs: list[TokenProbability] = []
        self.cached_tokens = 0
        self.preemptions = 0

    def take(self, step: EngineStep) -> int:
        """Add the output of a step; return the number of new tokens."""
        tokens = 0
        for choice in step.choices:
            tokens += len(choice.token_ids)
            self._take_choice(choice)
        self.cached_tokens = max(self.cached_tokens, step.cached_tokens)
        self.preemptions = max(self.preemptions, step.preemptions)
        if step.prompt_logprobs:
            self.prompt_logprobs = list(step.prompt_logprobs)
        return tokens

    def _take_choice(self, step: ChoiceStep) -> None:
        choice = self.choices.get(step.choice)
        if choice is None:
            choice = self.choices[step.choice] = ChoiceOutput()
        choice.token_ids.extend(step.token_ids)
        if step.text:
            choice.texts.append(step.text)
        choice.logprobs.extend(step.logprobs)
        choice.parts.extend(step.parts)
        if step.message is not None:
            choice.message = step.message
        if step.reasoning_tokens is not None:
            choice.reasoning_tokens = step.reasoning_tokens
        if step.finish_reason is not None:
            choice.finish_reason = step.finish_reason
            choice.stop_reason = step.stop_reason

    @property
    def tokens(self) -> int:
        """Tokens generated, summed over the completions."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of them that are reasoning; None if nobody counted them."""
        counted = [choice.reasoning_tokens for choice in self.choices.values() if choice.reasoning_tokens is not None]
        return sum(counted) if counted else None

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max((len(choice.token_ids) for choice in self.choices.values()), default=0)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons by completion."""
        return [self.choices[index].finish_reason for index in sorted(self.choices)]

    def has_more_of_the_prompt(self) -> bool:
        """Whether more log probabilities are the prompt's than the completions'."""
        of_outputs = sum(_count(choice.logprobs) for choice in self.choices.values())
        return _count(self.prompt_logprobs) > of_outputs

    def given_up(self) -> bool:
        """Whether the engine ended a completion that it had not finished."""
        return any(choice.finish_reason in {"error", "abort"} for choice in self.choices.values())

    def stopped_by_string(self) -> bool:
        """Whether a stop string ended a completion: the engine's blocks then come free outside a step."""
        return any(isinstance(choice.stop_reason, str) for choice in self.choices.values())

    def untell(self) -> None:
        """Begin again at offset 0 for a new watcher."""
        for choice in self.choices.values():
            choice.told_tokens = choice.told_texts = choice.told_parts = 0

    def deltas(self, request_id: str, attempt: int) -> list[pb.TokenDelta]:
        """Return what the watcher has not been sent, and count it as sent."""
        found = []
        for index, choice in self.choices.items():
            if choice.told_tokens == len(choice.token_ids) and choice.told_texts == len(choice.texts):
                continue
            found.append(
                pb.TokenDelta(
                    request_id=request_id,
                    attempt=attempt,
                    index=index,
                    offset=choice.told_tokens,
                    token_ids=choice.token_ids[choice.told_tokens :],
                    text="".join(choice.texts[choice.told_texts :]),
                    logprobs=[_logprob(p) for p in choice.logprobs[choice.told_tokens :]],
                    parts=joined(choice.parts[choice.told_parts :]),
                    as_message=self._as_message,
                )
            )
            choice.told_tokens = len(choice.token_ids)
            choice.told_texts = len(choice.texts)
            choice.told_parts = len(choice.parts)
        return found

    def fill(self, result: pb.Result, echo_text: str | None) -> None:
        """Write choices and prompt log probabilities into `result`.

        The echoed prompt stands in `prompt_text`; a choice has what was generated.
        """
        for index in sorted(self.choices):
            choice = self.choices[index]
            message = result.choices.add(
                index=index,
                text="".join(choice.texts),
                token_ids=choice.token_ids,
                finish_reason=FINISH_REASONS.get(choice.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
            )
            if choice.message is not None:
                message.message.CopyFrom(choice.message)
            if choice.logprobs:
                message.logprobs.extend(_logprob(p) for p in choice.logprobs)
            if isinstance(choice.stop_reason, str):
                message.stop_string = choice.stop_reason
            elif choice.stop_reason is not None:
                message.stop_token_id = choice.stop_reason
        if self.prompt_logprobs:
            result.prompt_logprobs.extend(_logprob(p) for p in self.prompt_logprobs)
        if echo_text is not None:
            result.prompt_text = echo_text


def _count(entries: Sequence[TokenProbability]) -> int:
    return sum(1 + len(entry.top) for entry in entries)


def _logprob(entry: TokenProbability) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        token=entry.token,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[_logprob(top) for top in entry.top],
    )
