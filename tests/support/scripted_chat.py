"""One output of a model, told as vLLM's own chat server tells it and as Penstock does; no engine runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from penstock.openai.answers import body_of
from penstock.openai.bodies import CHAT_URL, ChatBody, parse_body
from penstock.openai.chunks import Chunks
from penstock.openai.convert import to_request
from penstock.openai.shape import Shape
from penstock.queue.v1 import queue_pb2
from penstock.request.v1 import request_pb2 as pb
from penstock.tiny_model import END_ID
from services.worker.core.messages import Credits, Ending, EndingKind, Lease
from services.worker.engine import PromptSpec
from services.worker.run import Run
from services.worker.vllm.checks import Parsers
from services.worker.vllm.parsing import MessageRun, parser_class
from services.worker.vllm.renderer import VllmRenderer
from services.worker.vllm.sampling import engine_step
from services.worker.vllm.templates import ChatDefaults
from services.worker.wire import prompt_spec
from tests.support.chat_streams import joined

MESSAGES = [{"role": "user", "content": "what is 3 + 4?"}]
SPENT = Credits(granted_ns=0, booked_blocks=1, settled_blocks=1, released_blocks=1, tokenizer_acks=1)


@dataclass(frozen=True)
class Script:
    """What the model says: a text, handed over some tokens at a time."""

    text: str
    finish: str = "stop"
    tokens_a_step: int = 1


class Both:
    """vLLM's server and a worker, with the same model and parsers."""

    def __init__(self, config: Any, parsers: Parsers, variables: Mapping[str, Any] | None = None) -> None:
        """Take vLLM's configuration of the model, and what templates have by default."""
        self._config = config
        self._variables = dict(variables or {})
        self._parsers = parsers
        self._renderer = VllmRenderer(config, bool(parsers.tools), defaults=ChatDefaults(None, self._variables))
        self._tokenizer = self._renderer._renderer.get_tokenizer()
        self._parser = parser_class(*parsers, self._tokenizer)

    # ---- vLLM's server ----

    def _serving(self) -> OpenAIServingChat:
        serving: Any = object.__new__(OpenAIServingChat)
        serving.__dict__.update(
            response_role="assistant", parser_cls=self._parser, model_config=self._config.model_config,
            chat_template=None, chat_template_content_format="auto", default_chat_template_kwargs=self._variables,
            enable_auto_tools=bool(self._parsers.tools), enable_prompt_tokens_details=False,
            _include_reasoning_tokens_details=bool(self._parsers.reasoning), enable_force_include_usage=False,
            enable_log_outputs=False, request_logger=None, enable_per_request_metrics=False, system_fingerprint=None,
            return_tokens_as_token_ids=False,
        )  # fmt: skip
        return cast(OpenAIServingChat, serving)

    def theirs(self, fields: dict[str, Any], script: Script) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what vLLM's server tells its engine, and its answer: a body, or what a stream joins to.

        What comes before the engine is as in `OnlineRenderer.preprocess_chat`.
        """
        serving = self._serving()
        stream = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
        request = ChatCompletionRequest(model="tiny", messages=MESSAGES, **fields, **stream)
        kwargs = serving._effective_chat_template_kwargs(request)
        parser = None
        if self._parser is not None:
            parser = serving._make_parser(request, self._tokenizer, kwargs)
            if self._parsers.reasoning or request.tool_choice != "none":
                request = serving._make_parser(request, self._tokenizer, kwargs).adjust_request(request)
        prompt_ids = self._prompt_ids(fields)
        engine: dict[str, Any] = {}
        if self._parsers.reasoning:
            engine = serving._engine_reasoning_kwargs(request, parser, kwargs, prompt_ids)
        engine["shape"] = request.extract_structured_outputs()
        engine["skip_special_tokens"] = request.skip_special_tokens
        outputs = self._outputs(prompt_ids, script, fields, whole=not fields.get("stream"))
        metadata = RequestResponseMetadata(request_id="r-1")
        common: Any = (request, each(outputs), "chatcmpl-r-1", "tiny", [], self._tokenizer, metadata)
        if fields.get("stream"):
            told = asyncio.run(every(serving.chat_completion_stream_generator(*common, chat_template_kwargs=kwargs)))
            return engine, joined([line.removeprefix("data: ").strip() for line in told])
        answer = asyncio.run(serving.chat_completion_full_generator(*common, parser=parser))
        return engine, answer.model_dump()

    # ---- Penstock ----

    def ours(self, fields: dict[str, Any], script: Script) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the same of a worker and who writes the answer out of its result and deltas."""
        body = parse_body(CHAT_URL, {"messages": MESSAGES, **fields}, streams=True)
        assert isinstance(body, ChatBody)
        run = self._run(to_request(body))
        reader: MessageRun | None = None
        engine: dict[str, Any] = {}
        asked = run.for_engine(64, guaranteed=False)
        if asked.chat is not None:
            reader = MessageRun(self._parser, self._tokenizer, self._config.model_config, asked, self._variables)
            params = SamplingParams()
            reader.constrain(params)
            shape, skips = params.structured_outputs, params.skip_special_tokens
            engine = {**reader.of_engine(), "shape": shape, "skip_special_tokens": skips}
        chunks = Chunks(Shape.of(body), "r-1", 0, "tiny", 1, True, body.offers_tools)
        lines: list[str] = []
        top = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
        for output in self._outputs(list(run.prompt_ids), script, fields):
            step = engine_step(output, top)
            run.output.take(step if reader is None else reader.read(step))
            for message in run.token_messages():
                lines += chunks.of_delta(queue_pb2.WorkerToQueue.FromString(message).tokens)
        complete = queue_pb2.WorkerToQueue.FromString(run.finish(Ending(EndingKind.COMPLETED), "tiny", SPENT)).complete
        if body.stream:
            return engine, joined([*lines, *chunks.of_result(complete.result)])
        return engine, body_of(Shape.of(body), complete.result)

    def _run(self, request: pb.Request) -> Run:
        run = Run(Lease("r-1", 1, 1), "r-1#1", request, 0, 0, bool(self._parsers.reasoning))
        run.prompt_ids = self._renderer.render(prompt_spec(request)).token_ids
        return run

    # ---- for both ----

    def _prompt_ids(self, fields: dict[str, Any]) -> list[int]:
        kwargs = json.dumps(fields.get("chat_template_kwargs", {}))
        spec = PromptSpec(messages_json=json.dumps(MESSAGES), chat_template_kwargs_json=kwargs)
        return self._renderer.render(spec).token_ids.tolist()

    def _outputs(
        self, prompt_ids: list[int], script: Script, fields: dict[str, Any], whole: bool = False
    ) -> Iterator[RequestOutput]:
        """Yield what the engine hands over; the token that stops it has no text."""
        ids = self._tokenizer.encode(script.text, add_special_tokens=False)
        ids += [END_ID] if script.finish == "stop" else []
        size = len(ids) if whole else script.tokens_a_step
        for place in range(0, len(ids), size):
            some = ids[place : place + size]
            last = place + size >= len(ids)
            logprobs: Any = [{one: Logprob(-0.5, 1, self._tokenizer.decode([one]))} for one in some]
            text = self._tokenizer.decode(some, skip_special_tokens=True)
            said = CompletionOutput(0, text, some, None, logprobs if fields.get("logprobs") else None)
            said.finish_reason = script.finish if last else None
            yield RequestOutput("r-1", None, prompt_ids, None, [said], last)


async def each(outputs: Iterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    """Yield them as an engine does."""
    for output in outputs:
        yield output


async def every(lines: AsyncIterator[str]) -> list[str]:
    """Return all lines of a stream."""
    return [line async for line in lines]
