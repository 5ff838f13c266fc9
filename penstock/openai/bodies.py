"""The bodies of `/v1/chat/completions` and `/v1/completions`, strictly: what Penstock carries, and nothing else.

Field names and meanings are those of vLLM's own protocol. A field that would
change the answer but cannot be honoured is refused by name, unless it has the
value that changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.openai.limits import MAX_ENTRIES, MAX_PROMPTS, MAX_STOP_STRINGS, MAX_TOKEN_ID
from penstock.openai.parts import wrong_part
from penstock.openai.strict import Entries, Items, OnlyFalse, Strict, complaint, is_same

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for completions that name no max_tokens."""

NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_mm_kwargs": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's or vLLM's protocol that are refused, and their values that change nothing (null never does)."""

STREAMING: dict[str, tuple[Any, ...]] = {"stream": (False,), "stream_options": ()}
"""Fields that say how the answer is delivered: refused like NOT_CARRIED where nobody waits for it, as in batches."""

WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Fields that never change an answer and that vLLM does not know; accepted whatever they hold, and left out."""

Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Tokens: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Logprobs: TypeAlias = Annotated[int, Field(ge=-1, le=2**31 - 1)]
NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]


class BodyError(ValueError):
    """A body is wrong; `param` names the field, `code` the problem."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        """Say what is wrong with which field."""
        super().__init__(message)
        self.param = param
        self.code = code


class JsonSchema(Strict):
    """The `json_schema` of a response format."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Shape of the output, the OpenAI way; a structural tag keeps whatever fields it has."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is needed with type json_schema, and only there")
        if self.model_extra and self.type != "structural_tag":
            raise ValueError(f"there is no field {next(iter(self.model_extra))!r} with type {self.type}")
        return self


class StructuredOutputs(Strict):
    """Shape of the output, the vLLM way: exactly one constraint."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: NonEmpty | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: NonEmpty | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class Function(Strict):
    """A function the model may call."""

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One of the `tools`."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: NonEmpty


class NamedTool(Strict):
    """The `tool_choice` of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class StreamOptions(Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: OnlyFalse | None = None
    include_obfuscation: OnlyFalse | None = None


class Body(Strict):
    """What both endpoints take."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Entries[float] | None = None
    max_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    presence_penalty: Penalty | None = None
    seed: Int64 | None = None
    stop: str | Items[NonEmpty] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    prompt_logprobs: Logprobs | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    bad_words: Items[NonEmpty] | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int32 | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: OnlyFalse | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    vllm_xargs: Entries[str | int | float | Items[str | int | float]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Without effect; its type is checked, as vLLM does."""

    @field_validator("stop")
    @classmethod
    def _few_stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == "":
            raise ValueError("a stop string must not be empty")
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(value)}")
        return value

    @field_validator("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", mode="before")
    @classmethod
    def _few_entries(cls, value: Any) -> Any:
        """Refuse too many before any of them is looked at."""
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
            raise ValueError(f"at most {MAX_ENTRIES} entries, got {len(value)}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            # The length first: of thousands of digits Python makes no number.
            if not key.isdecimal() or len(key) > len(str(MAX_TOKEN_ID)) or int(key) > MAX_TOKEN_ID:
                raise ValueError(f"{key[:80]!r} is not a token id")
        return value

    @model_validator(mode="after")
    def _one_shape(self) -> Body:
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("response_format and structured_outputs exclude each other")
        return self

    @model_validator(mode="after")
    def _options_are_those_of_a_stream(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def offers_tools(self) -> bool:
        """Whether the model is offered functions to call."""
        return False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of a completion, one or several; none of a chat."""
        return []

    @property
    def streamed_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int | None:
        """Most tokens per completion; None means up to the model's window."""
        return self.max_tokens


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NonEmpty | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Items[Entries[str]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    tools: Annotated[Items[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("messages")
    @classmethod
    def _messages_have_roles(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for position, message in enumerate(value):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {position} has no role")
        return value

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self

    @model_validator(mode="after")
    def _the_chosen_tool_is_there(self) -> ChatBody:
        if not self.tools and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice needs tools")
        if not self.tools or not isinstance(self.tool_choice, NamedTool):
            return self
        if self.tool_choice.function.name not in {tool.function.name for tool in self.tools}:
            raise ValueError("tool_choice names a function that is not among the tools")
        if self.structured_outputs and self.structured_outputs.model_fields_set & {"json_", "regex", "choice"}:
            raise ValueError("structured_outputs and the tool_choice of one function exclude each other")
        return self

    @property
    def offers_tools(self) -> bool:
        """Whether the model is offered functions to call."""
        return self.tools is not None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens per completion; None means up to the model's window."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def answer_role(self) -> str:
        """Role of the answering message."""
        return "assistant" if self.add_generation_prompt is not False else str(self.messages[-1]["role"])


class CompletionBody(Body):
    """Body of `/v1/completions`."""

    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _no_prompt_is_empty(cls, value: Any) -> Any:
        several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
        prompts = value if several else [value]
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}")
        if any(prompt in ("", []) for prompt in prompts):
            raise ValueError("the prompt is empty")
        return value

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _token_ids_are_told_as_such(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            bounds = {"greater_than_equal": "not negative", "less_than_equal": f"at most {MAX_TOKEN_ID}"}
            for problem in error.errors(include_url=False):  # one for each kind of prompt
                if problem["type"] in bounds:
                    got = repr(problem["input"])[:80]
                    raise ValueError(f"token ids are {bounds[problem['type']]} (got {got})") from None
            raise

    @field_validator("prompt")
    @classmethod
    def _one_is_itself(cls, value: Any) -> Any:
        return value[0] if len(value) == 1 and isinstance(value[0], str | list) else value

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        value: Any = self.prompt
        return value if isinstance(value, list) and isinstance(value[0], str | list) else [value]

    @property
    def most_tokens(self) -> int | None:
        """Most tokens per completion."""
        return self.max_tokens if self.max_tokens is not None else COMPLETIONS_MAX_TOKENS


MODELS: dict[str, type[ChatBody | CompletionBody]] = {CHAT_URL: ChatBody, COMPLETIONS_URL: CompletionBody}


def parse_body(url: str, body: dict[str, Any], streams: bool = False) -> ChatBody | CompletionBody:
    """Return the checked body for one of the two endpoints; raises BodyError naming the first wrong field.

    `streams` says whether the asker can have the answer as a stream.
    """
    kind = MODELS[url]
    refused = NOT_CARRIED if streams else NOT_CARRIED | STREAMING
    kept = {}
    for name, value in body.items():
        if name in WITHOUT_EFFECT:
            continue
        if name in refused and (name not in kind.model_fields or name in STREAMING):
            if value is None or any(is_same(value, neutral) for neutral in refused[name]):
                continue
            where = " in batches" if name in STREAMING else ""
            raise BodyError(f"{name}: not supported{where}", name, "unsupported_parameter")
        kept[name] = value
    try:
        checked = kind.model_validate(kept)
    except ValidationError as error:
        raise _body_error(error) from None
    _only_what_a_stream_tells(checked)
    if isinstance(checked, ChatBody):
        _only_text(checked)
    if len(checked.prompts) > 1 and not streams:
        raise BodyError("prompt: several prompts are not supported in batches", "prompt", "unsupported_parameter")
    if checked.min_tokens and checked.most_tokens is not None and checked.min_tokens > checked.most_tokens:
        most = "max_completion_tokens" if kept.get("max_completion_tokens") is not None else "max_tokens"
        raise BodyError(f"min_tokens: {checked.min_tokens} is more than {most} {checked.most_tokens}", "min_tokens")
    return checked


def _only_what_a_stream_tells(body: ChatBody | CompletionBody) -> None:
    """Raise BodyError if a stream is to tell of the prompt, of which all is known when the result is."""
    told = {"prompt_logprobs": body.prompt_logprobs is not None, "echo": isinstance(body, CompletionBody) and body.echo}
    wrong = next((name for name, is_told in told.items() if is_told), None)
    if body.stream and wrong:
        raise BodyError(f"{wrong}: not supported in a stream", wrong, "unsupported_parameter")


def _only_text(body: ChatBody) -> None:
    wrong = wrong_part(body.messages)
    if wrong is not None:
        code = "invalid_value" if wrong.malformed else "unsupported_parameter"
        raise BodyError(f"{wrong.place}: {wrong.text}", wrong.place, code)


def _body_error(error: ValidationError) -> BodyError:
    """Return the first problem as a BodyError.

    Unions report one per branch, so the field's name is what counts; of many messages the place does too.
    """
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    path = ".".join(place)
    if problem["type"] == "extra_forbidden":
        return BodyError(f"{path}: there is no such field", path, "unknown_parameter")
    if problem["type"] == "missing":
        return BodyError(f"{path}: is missing", path, "missing_parameter")
    if problem["input"] is True and problem.get("ctx") == {"expected": "False"}:
        return BodyError(f"{path}: not supported", path, "unsupported_parameter")
    param = path if path.startswith("messages.") else place[0] if place else ""
    text = complaint(problem)
    return BodyError(f"{param}: {text}", param) if param else BodyError(text, text.split()[0])
