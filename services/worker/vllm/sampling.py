"""Between the request's sampling parameters and vLLM's, and between vLLM's outputs and the worker's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from penstock.limits import MAX_REQUEST_BYTES
from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineStep, RequestRefusedError
from services.worker.logprobs import least_prompt_logprobs
from services.worker.untrusted import refuse_transfer
from services.worker.vllm.logprobs import of_choice

MODEL_DEFAULTS: dict[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
"""Parameters a model's generation config may set, with what holds if neither it nor the request does; as vLLM's
OpenAI server merges them, so that a request means the same here and there."""

PLAIN_FIELDS = (
    "n",
    "min_tokens",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "thinking_token_budget",
)
"""Optional fields that vLLM takes under the same name, and only if they are set."""

STRUCTURED = "sampling.structured_outputs"
"""The field that gives an output its form; vLLM's complaints about it name none."""

NARROWING = ("allowed_token_ids", "bad_words")
"""Fields that forbid tokens whatever the output's form allows; where that allows only its end, `min_tokens` do not."""

COMPLAINTS = (VLLMError, ValueError, TypeError, OverflowError, RecursionError)
"""What vLLM raises, with words for whoever asked, where parameters are wrong, or cannot be told to its core.

How deeply nested JSON can be read depends on the stack of whoever reads it: the queue has read all that comes here.
"""

UNREADABLE = (*COMPLAINTS, KeyError)
"""The same, of what shapes a prompt, or how the answer to it is read."""

NOT_THE_REQUESTS = (ImportError, MemoryError)
"""What its checks of a request may raise that says nothing of the request: a backend that is not installed."""

LENGTH_PARAMETERS = {"input_text", "input_tokens"}
"""What vLLM calls the parameter at fault when a prompt is too long."""


def sampling_params(
    sampling: pb.SamplingParams, max_tokens: int, echo: bool, model_defaults: Mapping[str, Any]
) -> SamplingParams:
    """Return vLLM's parameters. Raises RequestRefusedError with vLLM's message and the field at fault."""
    asked = {field.name: value for field, value in sampling.ListFields()}
    values: dict[str, Any] = {
        name: asked.get(name, model_defaults.get(name, default)) for name, default in MODEL_DEFAULTS.items()
    }
    values.update({name: asked[name] for name in PLAIN_FIELDS if name in asked})
    if echo and "prompt_logprobs" not in asked and "logprobs" in asked:
        values["prompt_logprobs"] = sampling.logprobs
    stop_token_ids = [*sampling.stop_token_ids, *(model_defaults.get("stop_token_ids") or ())]
    try:
        params = SamplingParams.from_optional(
            **values,
            max_tokens=max_tokens,
            stop=list(sampling.stop) or None,
            stop_token_ids=stop_token_ids or None,
            bad_words=list(sampling.bad_words) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            logit_bias=dict(sampling.logit_bias) or None,
            structured_outputs=_structured(sampling),
            extra_args=_extra_args(sampling.extra_args_json),
            output_kind=RequestOutputKind.DELTA,
            # Made for this request alone; a copy would cost as much as the rest of the call.
            skip_clone=True,
        )
    except COMPLAINTS as error:
        raise refusal(error) from None
    # In lists, not as an object for each, of which the front-end keeps all while a run goes on.
    params.flat_logprobs = True
    return params


def _structured(sampling: pb.SamplingParams) -> StructuredOutputsParams | None:
    if not sampling.HasField("structured_outputs"):
        return None
    wanted = sampling.structured_outputs
    kind = wanted.WhichOneof("kind")
    values: dict[str, Any] = {
        "disable_any_whitespace": wanted.disable_any_whitespace,
        "disable_additional_properties": wanted.disable_additional_properties,
        "whitespace_pattern": wanted.whitespace_pattern or None,
    }
    if kind == "choice":
        values["choice"] = list(wanted.choice.values)
    elif kind is not None:
        values["json" if kind == "json_schema" else kind] = getattr(wanted, kind)
    try:
        return StructuredOutputsParams(**values)
    except COMPLAINTS as error:
        refused = refusal(error)
        raise RequestRefusedError(refused.code, refused.message, STRUCTURED) from None


def _extra_args(text: str) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise VLLMValidationError(f"extra_args_json is not JSON: {error}", parameter="extra_args_json") from None
    except RecursionError:
        raise VLLMValidationError("extra_args_json is nested too deeply", parameter="extra_args_json") from None
    if not isinstance(extra, dict):
        raise VLLMValidationError("extra_args_json is not a JSON object", parameter="extra_args_json")
    refuse_transfer(extra)
    return extra


def refusal(error: BaseException, where: str = "sampling") -> RequestRefusedError:
    """Return vLLM's complaint in the words of a request error; `where` is the message the field belongs to."""
    # The first argument of an error of encoding is the code's name alone.
    message = str(error.args[0]) if error.args and not isinstance(error, UnicodeError) else str(error)
    if isinstance(error, RecursionError):
        message = "nested too deeply to be read"
    elif not isinstance(error, COMPLAINTS):
        message = f"vLLM cannot read it ({type(error).__name__}{message and ': '}{message})"
    parameter = getattr(error, "parameter", None) or ""
    if parameter in LENGTH_PARAMETERS or "longer than the maximum model length" in message:
        return RequestRefusedError("context_length_exceeded", message, "prompt")
    if not parameter and message.startswith("Token id ") and message.endswith(" is out of vocabulary"):
        # A prompt's: vLLM looks at its ids when it takes the request in, with the parameters.
        return RequestRefusedError("invalid_prompt", message, "prompt")
    # Lengths are parameters, and looked at with the prompt.
    if where == "sampling" or parameter in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        return RequestRefusedError("invalid_parameter", message, f"sampling.{parameter}" if parameter else "sampling")
    return RequestRefusedError("invalid_prompt", message, parameter or where)


def refuse_unstorable(prompt_tokens: int, top: int | None, vocabulary: int, by_echo: bool) -> None:
    """Raise RequestRefusedError if the log probabilities of a prompt take more than can be stored, at the very least.

    `top` are those asked for of each token, of a `vocabulary` of so many; -1 means all, None that none are.
    """
    if top is None:
        return
    least_bytes = least_prompt_logprobs(prompt_tokens, vocabulary if top < 0 else min(top, vocabulary))
    if least_bytes > MAX_REQUEST_BYTES:
        text = (
            f"the log probabilities of {prompt_tokens} prompt tokens take at least {least_bytes} bytes, at most "
            f"{MAX_REQUEST_BYTES} can be stored; ask for fewer"
        )
        raise RequestRefusedError("result_too_large", text, "echo" if by_echo else "sampling.prompt_logprobs")


def refuse_dead_end(step: EngineStep, params: SamplingParams, first: bool, loads: bool) -> None:
    """Raise RequestRefusedError if a step of a run ends it because of the shape that its output must have.

    A left-recursive grammar allows no token, and what is forbidden beside the shape may be all that it allows: vLLM
    draws a token even so, and then finds it forbidden. Without a token end, in their first step, those that the
    engine's backend cannot compile: vLLM takes what any of its backends can, and works with the one that was asked for
    first. Every attempt would say so again. An engine that `loads` caches from elsewhere ends a run without a token
    where that fails, too.
    """
    if params.structured_outputs is None:
        return
    tokens = next((len(choice.token_ids) for choice in step.choices if choice.finish_reason == "error"), None)
    if tokens is None:
        return
    narrowing = [name for name in NARROWING if getattr(params, name)]
    if tokens == 0:
        text = "the engine cannot compile the structured outputs (or not in time) with the backend that it works with"
        told = first and not loads
    elif narrowing:
        text = f"the structured outputs and {' and '.join(narrowing)} together leave no token to be generated"
        told = True
    else:
        text = "the structured outputs allow no first token, as where a rule of a grammar begins with itself"
        told = first and tokens == 1
    if told:
        raise RequestRefusedError("invalid_parameter", text, STRUCTURED)


def engine_step(output: RequestOutput, top: int | None, preemptions: int = 0) -> EngineStep:
    """Return a delta output of vLLM, without what it says of the prompt.

    `top` are the log probabilities asked for, None for none; `preemptions` are those of the whole run.
    """
    return EngineStep(
        [_choice(choice, top) for choice in output.outputs],
        output.finished,
        cached_tokens=output.num_cached_tokens or 0,
        preemptions=preemptions,
    )


def _choice(choice: CompletionOutput, top: int | None) -> ChoiceStep:
    logprobs = of_choice(choice, top)
    return ChoiceStep(choice.index, choice.token_ids, choice.text, logprobs, choice.finish_reason, choice.stop_reason)
