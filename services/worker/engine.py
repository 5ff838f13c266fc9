"""What the worker asks of an engine, and of the renderer that turns prompts into token ids."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.request.v1 import request_pb2 as pb
from services.core.value import Value
from services.worker.core.messages import EngineReported

ENGINE_WATERMARK = 0.02
"""Share of its blocks that vLLM leaves free when it takes a request in beside running ones, unless `--watermark` says
otherwise. A grant is a forecast some milliseconds old; this looks at the blocks in the very step. What it holds back
waits in the engine for a step or two where it would have cost a preemption, so that more may be granted.

Derivation: requests that hold h blocks each, and take one more every `block_size` steps, grow into a share w of the
cache in `w * h * block_size` steps: 6 with h = 10 and blocks of 32, in which several of fifty requests end.
"""

ENGINE_END_S = 5.0
"""Seconds that an engine has to end by itself, where its worker has as many: as many as vLLM gives by itself."""

ENGINE_SCHEDULING = "priority"
"""vLLM's scheduling policy, unless `--scheduling-policy` says otherwise: what is within its channel's guarantee goes
before what is not, and is preempted after it. Among equals it is first come, first served."""


def priority_of(guaranteed: bool) -> int:
    """Return vLLM's priority of a run; the lower number goes first."""
    return -1 if guaranteed else 0


class EngineShape(NamedTuple):
    """What an engine can hold and how it counts."""

    engine: str
    """What kind of engine it is."""
    blocks_total: int
    """Usable KV-cache blocks (vLLM's null block not counted)."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Window in tokens, prompt and output together."""
    max_num_seqs: int
    """Most sequences the engine runs at once."""
    lookahead_tokens: int
    """Tokens that a sequence may have slots for beyond those it has returned, blocks that do not grow included."""
    model: str
    """Name the model is served under."""
    model_aliases: tuple[str, ...] = ()
    """Other names it answers to."""
    byte_bounded_tokenizer: bool = False
    """Whether no text of B UTF-8 bytes has more than B + special_tokens tokens."""
    special_tokens: int = 0
    """Special tokens the tokenizer may add to a text prompt."""
    default_max_tokens: int | None = None
    """Output tokens when a request asks for no number; None means up to the window."""
    ceiling_max_tokens: int | None = None
    """Most output tokens the model's configuration allows; None means the window."""
    tells_reasoning: bool = False
    """Whether it reads what the model thinks out of the output, for who wants the answer as a message."""
    guaranteed_first: bool = False
    """Whether it runs what is guaranteed before what is not, and preempts that first."""
    adapters: tuple[str, ...] = ()
    """Those of the other names under which it is another model: one with an adapter."""
    most_blocks: int = 0
    """Blocks that a sequence holds at most, whatever its length; 0 means that its length alone says so."""


class PromptSpec(Value):
    """A prompt and how to render it; crosses to the tokenizer's process. One of the first three is set."""

    def __init__(
        self,
        text: str | None = None,
        token_ids: tuple[int, ...] | None = None,
        messages_json: str | None = None,
        chat_template: str = "",
        chat_template_kwargs_json: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens: int = 0,
        want_text: bool = False,
        tools_json: str = "",
        tool_choice_json: str = "",
        form: bytes = b"",
    ) -> None:
        """Say what is to be rendered."""
        self.text, self.token_ids, self.messages_json = text, token_ids, messages_json
        self.chat_template, self.chat_template_kwargs_json = chat_template, chat_template_kwargs_json
        self.add_generation_prompt, self.continue_final_message = add_generation_prompt, continue_final_message
        self.add_special_tokens, self.truncate_prompt_tokens = add_special_tokens, truncate_prompt_tokens
        self.max_tokens = max_tokens
        self.want_text = want_text
        """Whether the rendered prompt is wanted as text (echo)."""
        self.tools_json = tools_json
        """Functions offered to the model; empty if there are none (chats only)."""
        self.tool_choice_json = tool_choice_json
        """Which of them it is to call; empty means as it likes."""
        self.form = form
        """What may give the output a form, as `forms.form_of` has it; empty if nothing does."""

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments that make another of it: a plain tuple is pickled in half the time."""
        return (
            self.text, self.token_ids, self.messages_json, self.chat_template, self.chat_template_kwargs_json,
            self.add_generation_prompt, self.continue_final_message, self.add_special_tokens,
            self.truncate_prompt_tokens, self.max_tokens, self.want_text, self.tools_json, self.tool_choice_json,
            self.form,
        )  # fmt: skip

    @property
    def characters(self) -> int:
        """How much there is to render; a token id counts as one."""
        return (
            len(self.text or "")
            + len(self.token_ids or ())
            + len(self.messages_json or "")
            + len(self.chat_template)
            + len(self.chat_template_kwargs_json)
            + len(self.tools_json)
            + len(self.tool_choice_json)
            + len(self.form)
        )


class Rendered(Value):
    """A rendered prompt; `text` is None unless it was asked for.

    The ids are unsigned 32-bit numbers. A prompt that waits for its engine keeps 4 bytes for each: as a list of
    Python's they take 36, and longer to make than to send from one process to another.
    """

    def __init__(self, token_ids: array[int], text: str | None = None) -> None:
        """Take what was rendered."""
        self.token_ids, self.text = token_ids, text


class RequestRefusedError(Exception):
    """The request can never be served as asked; `param` names the field at fault if one is."""

    def __init__(self, code: str, message: str, param: str = "") -> None:
        """Keep the three parts of the error."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class EngineDeadError(Exception):
    """The engine is gone, and every run in it."""


class Renderer(Protocol):
    """Turns prompts into token ids as the model's own server would."""

    def render(self, spec: PromptSpec) -> Rendered:
        """Render one prompt. Raises RequestRefusedError."""


class CheckingRenderer(Renderer, Protocol):
    """A renderer in a process of its own, for which there is another: what ends or holds up whom it calls may come."""

    def check_form(self, spec: PromptSpec, rendered: Rendered) -> None:
        """Look at the `form` that an output is to have, as the engine will. Raises RequestRefusedError if it would."""


class Tokenizer(Protocol):
    """Where prompts are rendered; the answers come to `Runner.tokenized`."""

    def render(self, name: str, spec: PromptSpec) -> None:
        """Queue a prompt."""

    def forget(self, name: str) -> None:
        """Leave a prompt out that nobody waits for any more; it may be answered all the same."""


class TokenProbability(NamedTuple):
    """Log probability of a token; `top` holds the likeliest tokens of its position, likeliest first."""

    token_id: int
    token: str
    logprob: float
    rank: int
    top: tuple[TokenProbability, ...] = ()


class Part(Value):
    """A piece of an answer that is read as a message, as `pb.ToolPart` has it."""

    def __init__(self, call: int | None, call_id: str, name: str, text: str, offset: int, reasoning: bool) -> None:
        """Say what comes at `offset` of the reasoning, of a call or, without either, of the content."""
        self.call, self.call_id, self.name, self.text = call, call_id, name, text
        self.offset, self.reasoning = offset, reasoning

    def goes_on(self, before: Part) -> bool:
        """Return whether it adds to the same text, and begins nothing."""
        return self.call == before.call and self.reasoning is before.reasoning and not self.name


class ChoiceStep(Value):
    """New output of completion number `choice`. `finish_reason` is vLLM's word, None while it runs."""

    def __init__(
        self,
        choice: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenProbability] = (),
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        parts: Sequence[Part] = (),
        message: pb.ToolMessage | None = None,
        reasoning_tokens: int | None = None,
    ) -> None:
        """Say what a completion has gained."""
        self.choice, self.token_ids, self.text, self.logprobs = choice, token_ids, text, logprobs
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.parts = parts
        """What this adds to the message, of a run that wants it in parts."""
        self.message = message
        """What was thought, said and called, with the end of a run whose answer is read as a message."""
        self.reasoning_tokens = reasoning_tokens
        """How many tokens of the whole completion are reasoning, with its end, if somebody counted them."""


class EngineStep(Value):
    """New output of one run. With `finished` the engine holds no block of it any more.

    `preemptions` are those of all its completions so far.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceStep],
        finished: bool,
        cached_tokens: int = 0,
        preemptions: int = 0,
        prompt_logprobs: Sequence[TokenProbability] = (),
    ) -> None:
        """Say what a run has gained."""
        self.choices, self.finished, self.cached_tokens = choices, finished, cached_tokens
        self.preemptions, self.prompt_logprobs = preemptions, prompt_logprobs


class EngineRequest(Value):
    """A tokenized run. `max_tokens` is per completion and fits the window; `tell_at_tokens` is as in `tell_at`."""

    def __init__(
        self,
        run_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: pb.SamplingParams,
        echo: bool = False,
        tell_at_tokens: int = 1,
        chat: pb.ChatPrompt | None = None,
        guaranteed: bool = False,
        model: str = "",
    ) -> None:
        """Say what is to be run."""
        self.guaranteed = guaranteed
        """Whether it is within its channel's guarantee, and goes before what is not."""
        self.run_id, self.prompt_ids, self.max_tokens, self.sampling = run_id, prompt_ids, max_tokens, sampling
        self.echo, self.tell_at_tokens = echo, tell_at_tokens
        self.chat = chat
        """Set if the answer is to be read as a message: functions are offered, or reasoning is to be told apart."""
        self.model = model
        """Under which of the engine's names the model was asked for; empty for the first."""


def read_as_message(request: pb.Request, tells_reasoning: bool) -> pb.ChatPrompt | None:
    """Return the chat of a request that offers functions, or wants a message of an engine that tells reasoning."""
    if not request.HasField("chat"):
        return None
    chat = request.chat
    wanted = chat.HasField("tools") or (tells_reasoning and chat.HasField("as_message"))
    return chat if wanted else None


class StepTokens(Value):
    """What one engine step generated, over all runs."""

    def __init__(self, generated: int, gaps_s: Sequence[float]) -> None:
        """Say what a step has brought."""
        self.generated = generated
        """Tokens."""
        self.gaps_s = gaps_s
        """Seconds since the token before, of every token that was not the first of its sequence."""


class Engine(Protocol):
    """A continuous-batching engine. All calls come from one event loop."""

    @property
    def shape(self) -> EngineShape:
        """What the engine can hold."""

    def start(
        self,
        on_stats: Callable[[EngineReported], None],
        on_death: Callable[[str], None],
        on_tokens: Callable[[StepTokens], None],
    ) -> None:
        """Begin to work on the running loop.

        `on_stats` is called after each step, before its outputs are seen; `on_tokens` after each that generated any.
        """

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        """Run a request. Raises RequestRefusedError before the first step, EngineDeadError at any time."""

    def tell_at(self, run_id: str, tokens: int) -> None:
        """Say at which output length a run is next of interest: 0 means at its end, one it has reached every step.

        The engine may hold output back until then, except a first token; it need not. What it has held back comes at
        once when the run is of interest. Unknown runs are ignored.
        """

    async def abort(self, run_id: str) -> None:
        """Abort a run; on return no later request can be scheduled ahead of the abort. Unknown runs are ignored."""

    async def close(self, within_s: float = ENGINE_END_S, /) -> None:
        """Stop the engine and free what it holds; what has not ended by itself within so many seconds is killed."""
