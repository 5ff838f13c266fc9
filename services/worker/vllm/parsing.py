"""Answers as messages, as vLLM's server has them: reasoning and function calls, read out of the output by vLLM's own
parsers, and calls offered and forced by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam, ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.renderers.chat_utils import make_tool_call_id

from penstock.request.v1 import request_pb2 as pb
from services.worker.engine import ChoiceStep, EngineRequest, EngineStep, Part, RequestRefusedError
from services.worker.told import Told
from services.worker.vllm.sampling import UNREADABLE, refusal


def parser_class(tools: str, reasoning: str = "", tokenizer: Any = None) -> type[Parser] | None:
    """Return vLLM's parser of function calls called `tools` and of reasoning called `reasoning`; None if both are "".

    Raises TypeError if there is none of that name, or if it cannot work with `tokenizer`.
    """
    found: type[Parser] | None = ParserManager.get_parser(
        tool_parser_name=tools or None,
        reasoning_parser_name=reasoning or None,
        enable_auto_tools=bool(tools),
        tokenizer=tokenizer,
    )
    return found


def chat_request(chat: pb.ChatPrompt) -> ChatCompletionRequest:
    """Return a chat whose answer is read as vLLM's server has it; raises RequestRefusedError with vLLM's words."""
    tools = chat.tools
    offered: dict[str, Any] = {}
    try:
        if chat.HasField("tools"):
            offered["tools"] = json.loads(tools.tools_json)
            offered["tool_choice"] = json.loads(tools.tool_choice_json or '"auto"')
            offered["parallel_tool_calls"] = not tools.single_call
        return ChatCompletionRequest(
            messages=_calling(json.loads(chat.messages_json)),
            stream=tools.in_parts or chat.as_message.in_parts,
            include_reasoning=not chat.as_message.hides_reasoning,
            chat_template_kwargs=json.loads(chat.chat_template_kwargs_json or "null"),
            continue_final_message=chat.continue_final_message,
            add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
            **offered,
        )
    except UNREADABLE as error:
        raise refusal(error, _asked_of(chat)) from error


def _asked_of(chat: pb.ChatPrompt) -> str:
    """Return the field that has an answer read as a message."""
    return "tools" if chat.HasField("tools") else "messages"


def _calling(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what parsers read of a chat that is rendered: the calls made in it, after which some number theirs.

    vLLM's model would look at all of it again, on the event loop, and note each wrong message many times over.
    """
    return [
        {"role": "assistant", "tool_calls": message["tool_calls"]}
        for message in messages
        if message.get("role") == "assistant" and message.get("tool_calls")
    ]


@dataclass(slots=True)
class _Choice:
    """One completion: its parser, what came, what was told of it in parts, and the message if it is read whole."""

    parser: Parser | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    told: Told = field(default_factory=Told)
    message: pb.ToolMessage = field(default_factory=pb.ToolMessage)
    called: bool = False


class MessageRun:
    """One run whose answer is read as a message: functions are offered, or reasoning is to be told apart."""

    def __init__(
        self,
        parser: type[Parser] | None,
        tokenizer: Any,
        model_config: Any,
        run: EngineRequest,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Read the answer of `run` with `parser`; without one, which only `tool_choice: none` allows, it is a text.

        Parsers look at the variables of the chat's template, by default at these `variables`.
        """
        self._variables = dict(variables)
        assert run.chat is not None
        self._request = chat_request(run.chat)
        self._asked_of = _asked_of(run.chat)
        self._prompt_ids = list(run.prompt_ids)
        self._in_parts = bool(self._request.stream)
        self._tells_reasoning = run.chat.HasField("as_message")
        self._parser = parser
        self._reasons = parser is not None and parser.reasoning_parser_cls is not None
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._choices: dict[int, _Choice] = {}

    def constrain(self, params: SamplingParams) -> None:
        """Let the parser change what it needs: a grammar for calls that must be made, and its markers in the text.

        Raises RequestRefusedError for what it cannot read.
        """
        request, parser = self._request, self._made()
        if parser is None:
            return
        if request.tool_choice == "none" and not (parser.always_adjust_request or self._reasons):
            return
        request.structured_outputs = params.structured_outputs
        request.skip_special_tokens = params.skip_special_tokens
        request.spaces_between_special_tokens = params.spaces_between_special_tokens
        try:
            request = self._request = parser.adjust_request(request)
        except UNREADABLE as error:
            raise refusal(error, self._asked_of) from error
        params.structured_outputs = request.extract_structured_outputs()
        params.skip_special_tokens = request.skip_special_tokens
        params.spaces_between_special_tokens = request.spaces_between_special_tokens

    def of_engine(self) -> dict[str, Any]:
        """Return what the engine is told so that structured outputs begin where the reasoning ends.

        To be asked after `constrain`. Raises RequestRefusedError.
        """
        if not self._reasons:
            return {}
        try:
            ended = self._request.resolve_reasoning_ended(self._made(), self._prompt_ids)
        except UNREADABLE as error:
            raise refusal(error, self._asked_of) from error
        return {
            "reasoning_ended": ended,
            "reasoning_parser_kwargs": {"chat_template_kwargs": self._template_kwargs()},
        }

    def read(self, step: EngineStep) -> EngineStep:
        """Return a step with what its output adds to the messages. Raises RequestRefusedError if the parser fails."""
        try:
            return step.replace(choices=[self._read(choice) for choice in step.choices])
        except Exception as error:
            # What a parser trips over is the model's output: another attempt would say the same again.
            kind = "tool" if self._asked_of == "tools" else "reasoning"
            text = f"the {kind} parser cannot read the output: {type(error).__name__}: {error}"
            raise RequestRefusedError(f"{kind}_parser_failed", text, self._asked_of) from error

    def _made(self) -> Parser | None:
        if self._parser is None:
            return None
        try:
            return self._parser(
                self._tokenizer,
                self._request.tools,
                chat_template_kwargs=self._template_kwargs(),
                model_config=self._model_config,
            )
        except UNREADABLE as error:  # of a variable that it does not understand
            raise refusal(error, self._asked_of) from error

    def _template_kwargs(self) -> dict[str, Any]:
        asked = self._request.build_chat_params(None, "auto")
        kwargs: dict[str, Any] = asked.with_defaults(self._variables).chat_template_kwargs
        return kwargs

    def _read(self, step: ChoiceStep) -> ChoiceStep:
        choice = self._choices.get(step.choice)
        if choice is None:
            choice = self._choices[step.choice] = _Choice(self._made())
        if choice.parser is not None and not self._request.include_reasoning:
            step = step.replace(logprobs=())  # their tokens are those of the reasoning as well
        ended = step.finish_reason is not None
        choice.token_ids.extend(step.token_ids)
        parts: Sequence[Part] = ()
        if self._in_parts:
            parts = self._parts(choice, step, ended)
        else:
            choice.text.append(step.text)
            if ended:
                self._whole(choice)
        if not ended:
            return step.replace(parts=parts)
        counted = self._count(choice)
        reason = self._reason(choice, step)
        message = choice.told.message() if self._in_parts else choice.message
        return step.replace(parts=parts, message=message, finish_reason=reason, reasoning_tokens=counted)

    def _parts(self, choice: _Choice, step: ChoiceStep, ended: bool) -> list[Part]:
        if not choice.token_ids and not step.text and not ended:
            return []  # the prompt is still being prefilled
        if choice.parser is None:
            return parts_of(DeltaMessage(content=step.text), choice.told, False)
        delta = choice.parser.parse_delta(
            step.text, list(step.token_ids), self._request, prompt_token_ids=self._prompt_ids, finished=ended
        )
        if delta is None:
            return []
        if not self._tells_reasoning:
            delta.reasoning = None
        choice.called = choice.called or bool(delta.tool_calls)
        return parts_of(delta, choice.told, self._request.parallel_tool_calls is False)

    def _whole(self, choice: _Choice) -> None:
        """Read the whole output, as vLLM's server does where nothing is streamed."""
        text = "".join(choice.text)
        if choice.parser is None:
            choice.message.content = text
            return
        choice.parser.set_prompt_token_ids(self._prompt_ids)
        reasoning, content, calls = choice.parser.parse(
            text,
            self._request,
            enable_auto_tools=choice.parser.tool_parser is not None,
            model_output_token_ids=choice.token_ids,
        )
        wanted = self._request.tool_choice
        if wanted == "none":
            calls = []
        elif wanted != "auto":
            content = content or ""
        choice.called = bool(calls)
        if content is not None:
            choice.message.content = content
        if reasoning is not None and self._tells_reasoning and self._request.include_reasoning:
            choice.message.reasoning = reasoning
        _put_calls(choice.message, (calls or [])[: 1 if self._request.parallel_tool_calls is False else None])

    def _count(self, choice: _Choice) -> int | None:
        """Return how many tokens of a whole answer are reasoning; None where nobody can tell."""
        if choice.parser is None or not self._reasons:
            return None
        return int(choice.parser.count_reasoning_tokens(tuple(choice.token_ids)))

    def _reason(self, choice: _Choice, step: ChoiceStep) -> str | None:
        """Return the finish reason by vLLM's rules; they differ between streams and whole answers."""
        wanted = self._request.tool_choice
        stopped = step.finish_reason == "stop"
        named = isinstance(wanted, ChatCompletionNamedToolChoiceParam)
        if self._in_parts:
            calls = choice.called and stopped and not named
        else:
            calls = (choice.called and wanted == "auto") or (wanted == "required" and stopped)
        return "tool_calls" if calls else step.finish_reason


def parts_of(delta: DeltaMessage, told: Told, first_call_only: bool) -> list[Part]:
    """Return what `delta` adds to the message `told`, and add it there."""
    parts = []
    if delta.reasoning:
        parts.append(told.think(delta.reasoning))
    if delta.content:
        parts.append(told.say(delta.content))
    for call in delta.tool_calls:
        if first_call_only and call.index:
            continue
        name, arguments = "", ""
        if call.function is not None:
            name, arguments = call.function.name or "", call.function.arguments or ""
        part = told.call(call.index, call.id or "", name, arguments)
        if part is not None:
            parts.append(part)
    return parts


def _put_calls(message: pb.ToolMessage, calls: Sequence[FunctionCall]) -> None:
    for call in calls:
        message.tool_calls.add(id=call.id or make_tool_call_id(), name=call.name, arguments=call.arguments)
