"""What a request means to vLLM: its parameters, the form of its output, and what reads that as a message."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import VllmConfig

from services.worker.engine import EngineRequest, RequestRefusedError
from services.worker.vllm.adapters import refuse_prompt_logprobs
from services.worker.vllm.checks import Parsers
from services.worker.vllm.drafts import refuse_sampled
from services.worker.vllm.parsing import MessageRun, parser_class
from services.worker.vllm.sampler_room import SamplerRoom
from services.worker.vllm.sampling import NOT_THE_REQUESTS, STRUCTURED, refusal, refuse_unstorable, sampling_params
from services.worker.vllm.seeds import refuse_seed
from services.worker.vllm.structured import bound


class OutputLimits(NamedTuple):
    """What the model's configuration says of the number of output tokens; None where it says nothing."""

    default: int | None
    """Where a request asks for no number."""
    ceiling: int | None
    """The most that any may ask for."""


def output_limits(model_config: Any, defaults: Mapping[str, Any]) -> OutputLimits:
    """Return the limits of a model whose `defaults` are those of its generation config."""
    default = defaults.get("max_tokens")
    from_directory = model_config.generation_config not in {"auto", "vllm"}
    override = getattr(model_config, "override_generation_config", None) or {}
    return OutputLimits(default, default if from_directory else override.get("max_new_tokens"))


class Understanding:
    """Understands requests for one model and its parsers."""

    def __init__(self, config: VllmConfig, tokenizer: Any, parsers: Parsers, variables: Mapping[str, Any]) -> None:
        """Take vLLM's `config`, the model's `tokenizer`, and what templates have as `variables` by default.

        Raises TypeError if the `parsers` cannot work with the tokenizer.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._variables = variables
        self._defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self.limits = output_limits(config.model_config, self._defaults)
        self._room = SamplerRoom(config, tokenizer)
        self._parser = parser_class(*parsers, tokenizer) if any(parsers) else None

    def of(self, request: EngineRequest) -> tuple[SamplingParams, MessageRun | None]:
        """Return vLLM's parameters, and what reads the output if the answer is to be read as a message.

        Raises RequestRefusedError.
        """
        params = sampling_params(request.sampling, request.max_tokens, request.echo, self._defaults)
        by_echo = not request.sampling.HasField("prompt_logprobs")
        refuse_prompt_logprobs(self._config, params.prompt_logprobs is not None, by_echo)
        refuse_sampled(self._config, params)
        refuse_seed(self._config, params)
        vocabulary = self._config.model_config.get_vocab_size()
        refuse_unstorable(len(request.prompt_ids), params.prompt_logprobs, vocabulary, by_echo)
        self._room.refuse_beyond(params)
        message = None
        if request.chat is not None:
            model_config = self._config.model_config
            message = MessageRun(self._parser, self._tokenizer, model_config, request, self._variables)
            message.constrain(params)
        if params.structured_outputs is not None:
            is_clients = request.sampling.structured_outputs.HasField("grammar")
            bound(params.structured_outputs, request.max_tokens, is_clients)
        return params, message

    def verify(self, params: SamplingParams) -> None:
        """Raise RequestRefusedError if vLLM will not take the parameters: what it says itself when it is given them.

        Of a malformed structural tag some of its libraries say so with an assertion, or fail at what is not there.
        """
        try:
            self._verify(params)
        except NOT_THE_REQUESTS:
            raise
        except Exception as error:
            raise self.refusal_of(error, params) from error

    def refusal_of(self, error: BaseException, params: SamplingParams) -> RequestRefusedError:
        """Return vLLM's complaint about parameters as a request error.

        Of what gives the output its form vLLM names no field: it is that one if without it nothing is wrong.
        """
        refused = refusal(error)
        if refused.param != "sampling" or params.structured_outputs is None:
            return refused
        formless = copy(params)
        formless.structured_outputs = None
        try:
            self._verify(formless)
        except Exception:
            return refused
        return RequestRefusedError(refused.code, refused.message, STRUCTURED)

    def _verify(self, params: SamplingParams) -> None:
        config = self._config
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer)
