"""What gives an output its form, looked at in the tokenizer's process before the worker has anything to do with it.

The worker does the same, and vLLM in it, when the request is run: parsers of function calls write grammars, and vLLM
has schemas and grammars read by the libraries that compile them. Those are native code, which may end its process at
what it does not expect, or go on for ever; what has been through it here can be trusted to come through there.
Nothing is compiled here: with a vocabulary of 64,000 tokens that takes 5 ms for a schema of twenty fields, and 1.5 s
for the first, where to read one takes 0.3 ms, and all other prompts would wait.
"""

from __future__ import annotations

from contextlib import suppress

from penstock.request.v1 import request_pb2 as pb
from services.worker.core.sizing import output_tokens
from services.worker.engine import EngineRequest, PromptSpec, Rendered, read_as_message
from services.worker.forms import form_of, request_of
from services.worker.vllm.renderer import VllmRenderer
from services.worker.vllm.understanding import Understanding


class CheckingVllmRenderer:
    """The renderer of a tokenizer's process, which looks at forms as well."""

    def __init__(
        self, renderer: VllmRenderer, understanding: Understanding, window_tokens: int, tells_reasoning: bool
    ) -> None:
        """Render with `renderer`; the other three are those of the engine that the prompts are for."""
        self._renderer, self._understanding = renderer, understanding
        self._window_tokens, self._tells_reasoning = window_tokens, tells_reasoning

    def warm_up(self) -> None:
        """Do both once: vLLM imports at the first form what it looks at one with, and none is to wait for that."""
        self._renderer.warm_up()
        for built_once in ("llg_tokenizer", "grammar_factory"):  # of Mistral's tokenizer: half a second each
            with suppress(Exception):
                getattr(self._renderer.tokenizer, built_once)
        form = form_of(pb.SamplingParams(structured_outputs=pb.StructuredOutputs(json_schema="{}")))
        with suppress(Exception):  # whoever sends such a form is told
            self.check_form(PromptSpec(text="warm", form=form), self._renderer.render(PromptSpec(text="warm")))

    def render(self, spec: PromptSpec) -> Rendered:
        """Render one prompt. Raises RequestRefusedError."""
        return self._renderer.render(spec)

    def check_form(self, spec: PromptSpec, rendered: Rendered) -> None:
        """Raise RequestRefusedError if the engine will not take the form that an output is to have."""
        room = self._window_tokens - len(rendered.token_ids)
        if room < 1:
            return  # it is refused for that
        request = request_of(spec)
        most = output_tokens(room, spec.max_tokens, *self._understanding.limits)
        chat = read_as_message(request, self._tells_reasoning)
        asked = EngineRequest("", rendered.token_ids, most, request.sampling, request.echo, chat=chat)
        params, _ = self._understanding.of(asked)
        self._understanding.verify(params)
