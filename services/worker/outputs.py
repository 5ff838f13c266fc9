"""What a run has generated so far, and the result made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.request.v1 import request_pb2 as pb
from services.rpc.encoding import length_tag, varint
from services.worker.engine import ChoiceStep, EngineStep, Part, TokenProbability
from services.worker.logprobs import encoded, fields, size_bytes
from services.worker.told import joined

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
    "repetition": pb.FINISH_REASON_REPETITION,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


_RESULT_CHOICE: Final = length_tag(pb.Result, "choices")
_RESULT_PROMPT: Final = length_tag(pb.Result, "prompt_logprobs")
_CHOICE_LOGPROB: Final = length_tag(pb.Choice, "logprobs")
_DELTA_LOGPROB: Final = length_tag(pb.TokenDelta, "logprobs")


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
        self.logprobs: list[bytes] = []
        """Encoded, an entry for each token."""
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

    __slots__ = ("_as_message", "_scored", "cached_tokens", "choices", "least_bytes", "preemptions", "prompt_logprobs")

    def __init__(self, as_message: bool = False) -> None:
        """Begin empty. `as_message` says whether watchers are to be shown a message, and not the text."""
        self._as_message = as_message
        self._scored = False
        """Whether a completion has log probabilities."""
        self.choices: dict[int, ChoiceOutput] = {}
        self.prompt_logprobs: list[bytes] = []
        """Encoded, an entry for each token."""
        self.least_bytes = 0
        """What the result will take at the very least: its log probabilities, and a byte for a token or a character."""
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
            self._encode(step.prompt_logprobs, self.prompt_logprobs)
        self.least_bytes += tokens
        return tokens

    def _take_choice(self, step: ChoiceStep) -> None:
        choice = self.choices.get(step.choice)
        if choice is None:
            choice = self.choices[step.choice] = ChoiceOutput()
        choice.token_ids.extend(step.token_ids)
        if step.text:
            choice.texts.append(step.text)
            self.least_bytes += len(step.text)
        if step.logprobs:
            self._scored = True
            self._encode(step.logprobs, choice.logprobs)
        choice.parts.extend(step.parts)
        if step.message is not None:
            choice.message = step.message
        if step.reasoning_tokens is not None:
            choice.reasoning_tokens = step.reasoning_tokens
        if step.finish_reason is not None:
            choice.finish_reason = step.finish_reason
            choice.stop_reason = step.stop_reason

    def _encode(self, entries: Sequence[TokenProbability], behind: list[bytes]) -> None:
        more = [encoded(entry) for entry in entries]
        behind.extend(more)
        self.least_bytes += size_bytes(more)

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
        """Whether more of the log probabilities, in bytes, are the prompt's than the completions'."""
        of_outputs = sum(size_bytes(choice.logprobs) for choice in self.choices.values())
        return size_bytes(self.prompt_logprobs) > of_outputs

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

    def deltas(self, request_id: str, attempt: int) -> list[tuple[pb.TokenDelta, bytes]]:
        """Return what the watcher has not been sent, and count it as sent.

        Each delta comes with the encoded fields of its log probabilities, which belong behind it.
        """
        found = []
        for index, choice in self.choices.items():
            if choice.told_tokens == len(choice.token_ids) and choice.told_texts == len(choice.texts):
                continue
            delta = pb.TokenDelta(
                request_id=request_id,
                attempt=attempt,
                index=index,
                offset=choice.told_tokens,
                token_ids=choice.token_ids[choice.told_tokens :],
                text="".join(choice.texts[choice.told_texts :]),
                parts=joined(choice.parts[choice.told_parts :]),
                as_message=self._as_message,
            )
            found.append((delta, fields(_DELTA_LOGPROB, choice.logprobs[choice.told_tokens :])))
            choice.told_tokens = len(choice.token_ids)
            choice.told_texts = len(choice.texts)
            choice.told_parts = len(choice.parts)
        return found

    def fill(self, result: pb.Result, echo_text: str | None) -> list[bytes]:
        """Write what was generated into `result`; return encoded fields that belong behind it, in parts.

        Those are all choices if any has log probabilities, and the prompt's. The echoed prompt stands in
        `prompt_text`; a choice has what was generated.
        """
        more: list[bytes] = []
        for index in sorted(self.choices):
            choice = self.choices[index]
            if self._scored:
                message = pb.Choice()
                _write(choice, index, message)
                head = message.SerializeToString()
                more.append(_RESULT_CHOICE + varint(len(head) + size_bytes(choice.logprobs)) + head)
                more.append(fields(_CHOICE_LOGPROB, choice.logprobs))
            else:
                _write(choice, index, result.choices.add())
        if echo_text is not None:
            result.prompt_text = echo_text
        if self.prompt_logprobs:
            more.append(fields(_RESULT_PROMPT, self.prompt_logprobs))
        return more


def _write(choice: ChoiceOutput, index: int, message: pb.Choice) -> None:
    """Write everything but the log probabilities."""
    message.index = index
    message.text = "".join(choice.texts)
    message.token_ids.extend(choice.token_ids)
    message.finish_reason = FINISH_REASONS.get(choice.finish_reason, pb.FINISH_REASON_UNSPECIFIED)
    if choice.message is not None:
        message.message.CopyFrom(choice.message)
    if isinstance(choice.stop_reason, str):
        message.stop_string = choice.stop_reason
    elif choice.stop_reason is not None:
        message.stop_token_id = choice.stop_reason
