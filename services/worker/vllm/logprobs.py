"""vLLM's log probabilities as the worker has them, so many at a time.

A run that nobody watches is handed over at its end, and a prompt's are handed over at once: either can be a million,
which take seconds to be read. So they are taken in pieces, between which the event loop does what else there is to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput

from services.worker.engine import EngineStep, TokenProbability
from services.worker.vllm.pace import AT_THE_END

PIECE_ENTRIES = 256
"""Log probabilities that are taken at once, likeliest ones included: about 2 ms of the event loop, twenty times what it
costs to be handed a piece. Sequences that began together come with theirs together."""


def most_held_back(params: SamplingParams) -> int:
    """Return how many tokens of a completion are held back at most while nobody wants to hear of it."""
    top = params.logprobs
    if top is None:
        return AT_THE_END
    return max(1, PIECE_ENTRIES // ((1 + max(top, 0)) * params.n)) if top >= 0 else 1


class PromptLogprobs:
    """Those of one run's prompt, of which each completion brings the same."""

    def __init__(self, top: int | None, decode: Callable[[int], str]) -> None:
        """Tell the `top` likeliest of each token, -1 for all, None for none of any.

        `decode` gives the text of a token that the engine says nothing of.
        """
        self._top = top
        self._decode = decode

    def pieces(self, output: RequestOutput) -> Iterator[EngineStep]:
        """Yield what an output has of them, as steps that generate nothing."""
        top, positions = self._top, output.prompt_logprobs
        if top is None or not positions or not output.prompt_token_ids:
            return
        self._top = None
        pairs = zip(output.prompt_token_ids, positions, strict=False)
        entries = (self._entry(token_id, position, top) for token_id, position in pairs)
        size = max(1, PIECE_ENTRIES // (1 + top)) if top >= 0 else 1
        while piece := list(islice(entries, size)):
            yield EngineStep([], False, prompt_logprobs=piece)

    def _entry(self, token_id: int, position: Mapping[int, Any] | None, top: int) -> TokenProbability:
        if not position:  # Nothing comes before the first token: it has no probability.
            return TokenProbability(token_id, self._decode(token_id), 0.0, 0)
        return _probability(token_id, position, top)


def of_choice(choice: CompletionOutput, top: int | None) -> Sequence[TokenProbability]:
    """Return those of a completion's new tokens, with the `top` likeliest of each."""
    if top is None or choice.logprobs is None:
        return ()
    pairs = zip(choice.token_ids, choice.logprobs, strict=False)
    return [_probability(token_id, position, top) for token_id, position in pairs]


def _probability(token_id: int, position: Mapping[int, Any], top: int) -> TokenProbability:
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    likeliest = [_plain(other, entry) for other, entry in ranked if top < 0 or 0 < (entry.rank or 0) <= top]
    return _plain(token_id, position[token_id])._replace(top=tuple(likeliest))


def _plain(token_id: int, entry: Any) -> TokenProbability:
    return TokenProbability(token_id, entry.decoded_token or "", entry.logprob, entry.rank or 0)
