"""A stand-in for vLLM: real batching and block arithmetic, invented tokens, seeded.

For scale and fault tests, chosen only by `--engine simulated`. How long its
steps take is the profile's to say (docs/engine-model.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from services.worker.core.messages import EngineReported
from services.worker.engine import (
    ENGINE_END_S,
    ChoiceStep,
    EngineRequest,
    EngineShape,
    EngineStep,
    PromptSpec,
    Rendered,
    RequestRefusedError,
    StepTokens,
    priority_of,
)
from services.worker.simulated.batch import Batch
from services.worker.simulated.blocks import prompt_keys
from services.worker.simulated.profile import PROFILES
from services.worker.simulated.sequence import Sequence, StepResult
from services.worker.simulated.settings import SimulatedSettings
from services.worker.tools import refuse_calls
from services.worker.untrusted import refuse_media, refuse_template

BYTE_TOKENS = 256
"""Tokens 0 to 255 are bytes; the one after is the end of sequence."""

EOS_TOKEN = BYTE_TOKENS

UTF_32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
"""In this machine's order of bytes, and without a mark of it."""

WORDS = tuple(f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u"))
"""What the engine talks in: token n reads as word n modulo the list."""


class ByteRenderer:
    """One token per UTF-8 byte; a chat is its messages' contents, each on its own line after its role."""

    def __init__(self, max_model_len: int) -> None:
        """Refuse prompts longer than `max_model_len` tokens."""
        self._max_model_len = max_model_len

    def render(self, spec: PromptSpec) -> Rendered:
        """Render one prompt. Raises RequestRefusedError."""
        refuse_calls(spec)
        refuse_template(spec, {}, trusted=False)
        if spec.token_ids is not None:
            wrong = next((token for token in spec.token_ids if token > EOS_TOKEN), None)
            if wrong is not None:
                raise RequestRefusedError("invalid_prompt", f"token id {wrong} is out of vocabulary", "prompt")
            ids = array("I", spec.token_ids)
            text = bytes(token for token in ids if token < BYTE_TOKENS).decode(errors="replace")
        else:
            text = spec.text if spec.text is not None else _conversation(spec)
            ids = _tokens(text.encode())
        if spec.truncate_prompt_tokens is not None:
            keep = self._max_model_len - 1 if spec.truncate_prompt_tokens < 0 else spec.truncate_prompt_tokens
            ids = ids[-keep:] if keep else array("I")
        if len(ids) > self._max_model_len:
            raise RequestRefusedError(
                "context_length_exceeded",
                f"This model's maximum context length is {self._max_model_len} tokens. However, the prompt has "
                f"{len(ids)} tokens.",
                "prompt",
            )
        if not ids:
            raise RequestRefusedError("empty_prompt", "the prompt has no tokens", "prompt")
        return Rendered(ids, text if spec.want_text else None)

    def check_form(self, spec: PromptSpec, rendered: Rendered) -> None:
        """Take any form: output that is drawn by lot has none."""


def _tokens(text: bytes) -> array[int]:
    """Return one token per byte."""
    tokens = array("I")
    # Bytes are Latin-1's characters, and UTF-32 is four bytes for each: no number of Python's is made on the way.
    tokens.frombytes(text.decode("latin-1").encode(UTF_32))
    return tokens


def _conversation(spec: PromptSpec) -> str:
    try:
        messages = json.loads(spec.messages_json or "[]")
        refuse_media(messages)
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    except (ValueError, KeyError, TypeError) as error:
        raise RequestRefusedError("invalid_messages", f"messages cannot be read: {error}", "messages") from None
    return "".join(lines) + ("assistant:" if spec.add_generation_prompt else "")


@dataclass(slots=True)
class _Run:
    """One run: its sequences, their words, and the steps not yet fetched."""

    request: EngineRequest
    randoms: list[random.Random]
    lengths: list[int]
    deadly_tokens: int | None
    """Tokens of one of its completions that the engine dies of."""
    open_choices: set[int]
    steps: asyncio.Queue[EngineStep] = field(default_factory=asyncio.Queue)
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    last_token_s: dict[int, float] = field(default_factory=dict)

    @property
    def preemptions(self) -> int:
        return sum(sequence.preemptions for sequence in self.sequences)


class SimulatedEngine:
    """The engine: one task that steps the batch while there is work."""

    def __init__(self, settings: SimulatedSettings, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Make an idle engine; `sleep` waits for the seconds a step takes."""
        self._settings = settings
        self._sleep = sleep
        self._profile = PROFILES[settings.profile]
        self.batch = Batch(
            settings.num_blocks,
            settings.block_size,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.rules,
        )
        self._runs: dict[str, _Run] = {}
        self._work = asyncio.Event()
        self._on_stats: Callable[[EngineReported], None] = lambda _: None
        self._on_death: Callable[[str], None] = lambda _: None
        self._prefill_s = 0.0
        self._prefill_tokens = 0
        self._on_tokens: Callable[[StepTokens], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None

    @property
    def shape(self) -> EngineShape:
        """What the engine can hold."""
        settings = self._settings
        return EngineShape(
            engine="simulated",
            blocks_total=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            lookahead_tokens=0,
            model=settings.model,
            model_aliases=settings.model_aliases,
            byte_bounded_tokenizer=True,
            guaranteed_first=settings.rules.scheduling_policy == "priority",
        )

    def start(
        self,
        on_stats: Callable[[EngineReported], None],
        on_death: Callable[[str], None],
        on_tokens: Callable[[StepTokens], None],
    ) -> None:
        """Begin to work on the running loop; it dies of requests alone that say so."""
        self._on_death = on_death
        self._on_stats = on_stats
        self._on_tokens = on_tokens
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="simulated-engine")

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        """Run a request."""
        run = self._plan(request)
        self._runs[request.run_id] = run
        caching = self._settings.rules.enable_prefix_caching
        keys = prompt_keys(request.prompt_ids, self._settings.block_size) if caching else ()
        for index, length in enumerate(run.lengths):
            priority = priority_of(request.guaranteed)
            sequence = Sequence(_key(request.run_id, index), len(request.prompt_ids), length, keys, priority)
            run.sequences.append(sequence)
            self.batch.add(sequence)
        self._work.set()
        finished = False
        try:
            while not finished:
                step = await run.steps.get()
                finished = step.finished
                yield step
        finally:
            if not finished:
                self._drop(request.run_id)

    def tell_at(self, run_id: str, tokens: int) -> None:
        """Hand over every step whatever is wanted."""

    async def abort(self, run_id: str) -> None:
        """Abort a run; its iterator ends with finish reason `abort`."""
        run = self._drop(run_id)
        if run is not None:
            ends = [ChoiceStep(index, (), "", finish_reason="abort") for index in sorted(run.open_choices)]
            run.steps.put_nowait(EngineStep(ends, True, preemptions=run.preemptions))

    async def close(self, within_s: float = ENGINE_END_S) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=within_s)

    def _drop(self, run_id: str) -> _Run | None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            self.batch.remove({_key(run_id, index) for index in range(len(run.lengths))})
        return run

    def _plan(self, request: EngineRequest) -> _Run:
        """Draw the lengths of the completions, from the seeds alone."""
        sampling = request.sampling
        completions = sampling.n if sampling.HasField("n") else 1
        digest = hashlib.blake2b(
            repr((self._settings.seed, sampling.seed, tuple(request.prompt_ids))).encode(), digest_size=8
        ).hexdigest()
        randoms = [random.Random(f"{digest}:{index}") for index in range(completions)]
        forced = _extra_tokens(sampling.extra_args_json, "sim_output_tokens")
        deadly_tokens = _extra_tokens(sampling.extra_args_json, "sim_engine_dies_at_tokens")
        lengths = []
        for source in randoms:
            drawn = source.randint(1, request.max_tokens)
            length = request.max_tokens if sampling.ignore_eos else max(drawn, sampling.min_tokens)
            lengths.append(min(forced or length, request.max_tokens))
        return _Run(request, randoms, lengths, deadly_tokens, set(range(completions)))

    async def _steps(self) -> None:
        while True:
            if not self.batch.busy:
                self._work.clear()
                await self._work.wait()
            result = self.batch.step()
            duration_s = self._profile.step_s(result)
            await self._sleep(duration_s)
            if any(self._is_deadly(sequence) for sequence in result.sampled):
                self._on_death("it has run a request that asked for its death")
                return
            self._report(result, duration_s)
            self._deliver(result)

    def _is_deadly(self, sequence: Sequence) -> bool:
        run = self._runs.get(sequence.key.rpartition("#")[0])
        return run is not None and run.deadly_tokens == sequence.generated

    def _report(self, result: StepResult, duration_s: float) -> None:
        batch = self.batch
        # Each of the prompts that are being computed spends the whole step in prefill.
        self._prefill_s += duration_s * result.prefills
        self._prefill_tokens += result.prefill_tokens
        self._on_stats(
            EngineReported(
                batch.blocks_free,
                len(batch.running),
                len(batch.waiting),
                batch.preemptions,
                int(duration_s * 1e9),
                1 - batch.blocks_free / batch.blocks_total,
                int(self._prefill_s * 1e9),
                self._prefill_tokens,
                batch.blocks_shared,
            )
        )

    def _deliver(self, result: StepResult) -> None:
        """Hand each run the tokens its sequences got in this step."""
        ended = {id(sequence) for sequence in result.ended}
        by_run: dict[str, list[ChoiceStep]] = {}
        gaps_s: list[float] = []
        now_s = time.monotonic()
        for sequence in result.sampled:
            run_id, _, index = sequence.key.rpartition("#")
            run = self._runs.get(run_id)
            if run is None:
                # Aborted while the step was being computed.
                continue
            run.cached_tokens = max(run.cached_tokens, sequence.cached_tokens)
            number = int(index)
            if number in run.last_token_s:
                gaps_s.append(now_s - run.last_token_s[number])
            run.last_token_s[number] = now_s
            choice = self._choice(run, number, sequence, id(sequence) in ended)
            by_run.setdefault(run_id, []).append(choice)
        if by_run:
            self._on_tokens(StepTokens(sum(map(len, by_run.values())), gaps_s))
        for run_id, choices in by_run.items():
            run = self._runs[run_id]
            finished = not run.open_choices
            run.steps.put_nowait(EngineStep(choices, finished, run.cached_tokens, run.preemptions))
            if finished:
                del self._runs[run_id]

    def _choice(self, run: _Run, index: int, sequence: Sequence, ended: bool) -> ChoiceStep:
        token = run.randoms[index].randrange(BYTE_TOKENS)
        text = f" {WORDS[token % len(WORDS)]}"
        if not ended:
            return ChoiceStep(index, (token,), text)
        run.open_choices.discard(index)
        full = sequence.generated >= run.request.max_tokens
        reason = "length" if full else "stop"
        return ChoiceStep(index, (token if full else EOS_TOKEN,), text if full else "", finish_reason=reason)


def _key(run_id: str, index: int) -> str:
    return f"{run_id}#{index}"


def _extra_tokens(extra_args_json: str, name: str) -> int | None:
    """Return a number of tokens among the extra arguments. Raises RequestRefusedError if they cannot be read."""
    if not extra_args_json:
        return None
    try:
        value = json.loads(extra_args_json).get(name)
    except (ValueError, AttributeError, RecursionError):
        raise RequestRefusedError(
            "invalid_parameter", "extra_args_json is not a JSON object", "sampling.extra_args_json"
        ) from None
    if value is None or (isinstance(value, int) and value >= 1):
        return value
    raise RequestRefusedError(
        "invalid_parameter", f"{name} must be a number of tokens, at least 1", "sampling.extra_args_json"
    )
