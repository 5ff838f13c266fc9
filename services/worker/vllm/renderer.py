"""Prompts rendered by vLLM's own renderer, so that token ids are those its OpenAI server would use."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams, TokenizeParams, merge_kwargs

from services.worker.engine import PromptSpec, Rendered, RequestRefusedError
from services.worker.tools import refuse_calls
from services.worker.untrusted import refuse_media, refuse_template, refuse_tokenizing, refuse_variables
from services.worker.vllm.sampling import UNREADABLE, refusal
from services.worker.vllm.templates import NO_DEFAULTS, ChatDefaults

MISTRAL_ID_CHARACTERS = 9
"""Of a call's id that Mistral's tokenizer takes."""


class VllmRenderer:
    """Renders completions and chats for one model."""

    def __init__(
        self,
        config: VllmConfig,
        has_tool_parser: bool = False,
        trusts_templates: bool = False,
        shared: BaseRenderer[Any] | None = None,
        defaults: ChatDefaults = NO_DEFAULTS,
    ) -> None:
        """Load the tokenizer of the model of `config`, or use that of a renderer that is `shared`.

        Chats that need a tool parser are refused without one, and those with a template of their own unless trusted.
        The others are rendered with the `defaults`.
        """
        self._defaults = defaults
        self._has_tool_parser = has_tool_parser
        self._trusts_templates = trusts_templates
        self._model_config = config.model_config
        self._vocabulary: int = config.model_config.get_vocab_size()  # 0 where its configuration does not say
        self._renderer = renderer_from_config(config) if shared is None else shared

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._renderer.get_tokenizer()

    def warm_up(self) -> None:
        """Render a completion and a chat: the first chat looks for a template, imports, and compiles what it finds."""
        for spec in (PromptSpec(text="warm"), PromptSpec(messages_json='[{"role": "user", "content": "warm"}]')):
            with suppress(Exception):  # a model need not have a template; who sends such a prompt is told
                self.render(spec)

    def render(self, spec: PromptSpec) -> Rendered:
        """Render one prompt. Raises RequestRefusedError, with vLLM's message where it has one."""
        where = "messages" if spec.messages_json is not None else "prompt"
        try:
            prompt = self._chat(spec) if spec.messages_json is not None else self._completion(spec)
        except UNREADABLE as error:
            raise refusal(error, where) from error
        ids = array("I", prompt["prompt_token_ids"])
        self._refuse_unknown(ids, where)
        text = None
        if spec.want_text:
            text = prompt.get("prompt") or self._renderer.get_tokenizer().decode(ids.tolist())
        return Rendered(ids, text)

    def _refuse_unknown(self, ids: array[int], where: str) -> None:
        """Raise RequestRefusedError if the model has no embedding for a token: looking it up would end the engine.

        A tokenizer may have tokens that were added to it and not to the model. vLLM lets them pass, as some stand for
        media in models that put something in their place; without media, of which nothing is taken here, nothing is.
        """
        largest = max(ids, default=0)
        if largest >= self._vocabulary > 0:
            text = f"Token id {largest} is out of vocabulary: the model has {self._vocabulary} tokens"
            raise RequestRefusedError("invalid_prompt", text, where)

    def _completion(self, spec: PromptSpec) -> Any:
        source = list(spec.token_ids) if spec.token_ids is not None else spec.text
        parsed = parse_model_prompt(self._model_config, source)
        (rendered,) = self._renderer.render_cmpl([parsed], self._tokenize_params(spec, True))
        return rendered

    def _chat(self, spec: PromptSpec) -> Any:
        messages = json.loads(spec.messages_json or "[]")
        asked = json.loads(spec.chat_template_kwargs_json) if spec.chat_template_kwargs_json else {}
        if not isinstance(asked, dict):
            raise VLLMValidationError(
                "chat_template_kwargs is not a JSON object", parameter="chat.chat_template_kwargs_json"
            )
        refuse_template(spec, asked, self._trusts_templates)
        refuse_tokenizing(asked)
        refuse_media(messages)
        _rename_reasoning(messages)
        if self._is_mistral():
            refuse_variables(asked)
            shorten_call_ids(messages)
        fixed = {
            "add_generation_prompt": spec.add_generation_prompt,
            "continue_final_message": spec.continue_final_message,
            "tools": self._tools(spec),
        }
        parameters = ChatParams(
            chat_template=spec.chat_template or self._defaults.template,
            chat_template_kwargs=merge_kwargs(asked, fixed),
        ).with_defaults({**self._defaults.variables, "tokenize": self._template_tokenizes()})
        _, (rendered,) = self._renderer.render_chat([messages], parameters, self._tokenize_params(spec, False))
        return rendered

    def _tools(self, spec: PromptSpec) -> list[dict[str, Any]] | None:
        """Return the offered functions as templates are given them; None if there are none."""
        if not spec.tools_json:
            return None
        if not self._has_tool_parser:
            refuse_calls(spec)
        return [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in json.loads(spec.tools_json)]

    def _template_tokenizes(self) -> bool:
        """Whether the template gives token ids (Mistral's own tokenizer) and not text."""
        return self._is_mistral() or bool(self._model_config.enable_prompt_embeds)

    def _is_mistral(self) -> bool:
        from vllm.utils.mistral import is_mistral_tokenizer

        return bool(is_mistral_tokenizer(self._renderer.tokenizer))

    def _tokenize_params(self, spec: PromptSpec, special_by_default: bool) -> TokenizeParams:
        special = spec.add_special_tokens if spec.add_special_tokens is not None else special_by_default
        return TokenizeParams(
            max_total_tokens=self._model_config.max_model_len,
            # 0 would be what a model without output has, and truncation to the window would leave no room for any.
            max_output_tokens=spec.max_tokens or 1,
            truncate_prompt_tokens=spec.truncate_prompt_tokens,
            add_special_tokens=special,
            needs_detokenization=spec.want_text,
            max_total_tokens_param="max_model_len",
            max_output_tokens_param="max_tokens",
        )


def _rename_reasoning(messages: list[dict[str, Any]]) -> None:
    """Give what was thought in earlier turns the name by which the renderer knows it, as vLLM's server does.

    Clients send what they were sent, and many servers call it `reasoning_content`; templates find it under both names.
    """
    for message in messages:
        older = message.pop("reasoning_content", None)
        if older is not None and message.get("reasoning") is None:
            message["reasoning"] = older


def shorten_call_ids(messages: list[dict[str, Any]]) -> None:
    """Cut the ids of earlier calls to the nine characters at their end that Mistral's tokenizer takes, as vLLM's server
    does: those of other servers are longer."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    for holder, name in [*((call, "id") for call in calls), *((message, "tool_call_id") for message in messages)]:
        if isinstance(holder.get(name), str):
            holder[name] = holder[name][-MISTRAL_ID_CHARACTERS:]


def byte_bound(tokenizer: Any) -> tuple[bool, int]:
    """Return whether no text has more tokens than UTF-8 bytes, and the special tokens that come on top.

    Proven only for byte-level tokenizers that change nothing before they split:
    every token then covers at least one byte of the text as it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(backend, "normalizer", None) is not None:
        return False, 0
    try:
        state = json.loads(backend.pre_tokenizer.__getstate__())
        special = int(tokenizer.num_special_tokens_to_add())
    except (AttributeError, TypeError, ValueError):
        return False, 0
    stages = state.get("pretokenizers", [state])
    byte_level = [stage for stage in stages if stage.get("type") == "ByteLevel"]
    return bool(byte_level) and not any(stage.get("add_prefix_space") for stage in byte_level), special
