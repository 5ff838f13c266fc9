"""What vLLM's sampler has no room for: one such request would end the engine under all.

Neither of vLLM's model runners has a logit for a token that is in the tokenizer and not in the model. Where such a
token is to be kept down, the first raises, and the second, the default on a GPU, writes beside the request's own
logits; among bad words the first leaves it alone. The second also keeps stop tokens and bad words of every request in
tables of a fixed width, and raises within a step of all of them for one that does not fit. vLLM's own checks let all
that pass.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from copy import copy
from typing import Any, Final

from vllm import SamplingParams, envs
from vllm.exceptions import VLLMError

from services.worker.engine import RequestRefusedError
from services.worker.vllm.sampling import refusal

MOST_STOP_TOKENS: Final = 128
"""Of a request with `min_tokens`, the model's own ends among them: `MAX_NUM_STOP_TOKEN_IDS` of vLLM's sampler."""


class SamplerRoom:
    """The room of one engine's sampler."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """Take vLLM's `config`, and the `tokenizer` that bad words become tokens by."""
        self._is_bounded = bool(config.use_v2_model_runner)
        self._tokenizer = tokenizer
        self._vocabulary: int = config.model_config.get_vocab_size()  # 0 where its configuration does not say
        self._end_ids = _end_ids(config.model_config, tokenizer)

    def refuse_beyond(self, params: SamplingParams) -> None:
        """Raise RequestRefusedError if the sampler has no room for what the parameters ask for."""
        if params.min_tokens:
            self._refuse_unknown_ends()
        if not self._is_bounded:
            return
        if params.min_tokens:
            self._refuse_stop_tokens(params)
        if params.bad_words:
            self._refuse_bad_words(params)

    def _refuse_unknown_ends(self) -> None:
        """A token that was added to the tokenizer alone has no logit that could be kept down until enough are there."""
        largest = max(self._end_ids, default=0)
        if largest >= self._vocabulary > 0:
            text = (
                f"min_tokens: token id {largest}, which ends the output, is out of vocabulary: the model has "
                f"{self._vocabulary} tokens"
            )
            raise RequestRefusedError("invalid_parameter", text, "sampling.min_tokens")

    def _refuse_stop_tokens(self, params: SamplingParams) -> None:
        count = len(params.all_stop_token_ids | self._end_ids)
        if count > MOST_STOP_TOKENS:
            text = (
                f"{count} tokens end the output, the model's own among them; with min_tokens the engine takes "
                f"{MOST_STOP_TOKENS} at most"
            )
            raise RequestRefusedError("invalid_parameter", text, "sampling.stop_token_ids")

    def _refuse_bad_words(self, params: SamplingParams) -> None:
        tokenized = copy(params)  # the engine's own are tokenized when it takes them in
        try:
            tokenized.update_from_tokenizer(self._tokenizer)
        except (VLLMError, ValueError, TypeError) as error:
            raise refusal(error) from error
        words = tokenized.bad_words_token_ids or ()
        largest = max((token_id for word in words for token_id in word), default=0)
        if largest >= self._vocabulary > 0:
            # Its logit would be another request's, or nobody's.
            text = f"token id {largest} is out of vocabulary: the model has {self._vocabulary} tokens"
            raise RequestRefusedError("invalid_parameter", text, "sampling.bad_words")
        count = sum(map(len, words))
        if count > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
            text = (
                f"{count} tokens in all, some words with a space before them as well; the engine takes "
                f"{envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS} at most"
            )
            raise RequestRefusedError("invalid_parameter", text, "sampling.bad_words")


def _end_ids(model_config: Any, tokenizer: Any) -> AbstractSet[int]:
    """Return the tokens that end an output of the model by themselves, as vLLM adds them to a request's."""
    configured = model_config.try_get_generation_config().get("eos_token_id")
    own = [configured] if isinstance(configured, int) else list(configured or ())
    return frozenset(token_id for token_id in (*own, tokenizer.eos_token_id) if token_id is not None)
