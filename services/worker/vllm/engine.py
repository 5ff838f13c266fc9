"""vLLM's AsyncLLM in this process, its engine core in a child process. vLLM is imported in this folder alone.

`prepare` reads the engine's arguments and the model's configuration, before
anything is forked; `build` starts the engine, before any gRPC.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.exits import EX_CONFIG, EX_SOFTWARE
from services.worker.core.messages import EngineReported
from services.worker.engine import (
    ENGINE_END_S,
    EngineDeadError,
    EngineRequest,
    EngineShape,
    EngineStep,
    StepTokens,
    priority_of,
)
from services.worker.processes import guard_process_group, yield_to_engine
from services.worker.vllm.arguments import asked_parsers, check_model_path, fail, first_line, parse_engine_arguments
from services.worker.vllm.checks import NotServedError, Parsers, check_arguments, check_started
from services.worker.vllm.core_end import how_core_ended, how_killed_at_start
from services.worker.vllm.pace import Pace
from services.worker.vllm.shape import lookahead_tokens, most_blocks, state_blocks
from services.worker.vllm.sharing import Sharing
from services.worker.vllm.starting import telling_of_start
from services.worker.vllm.stats import EngineStats, RunPreemptions, no_metrics

HEALTH_INTERVAL_S = 0.5
"""How often an engine that runs nothing is asked whether it lives; one that runs something says so at once."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults for vLLM, set only where the user has set nothing."""


class Prepared:
    """A checked configuration, from which the renderer and the engine are made."""

    def __init__(
        self,
        config: Any,
        names: tuple[str, ...],
        on_cpu: bool,
        parsers: Parsers,
        trusts: bool,
        adapters: Mapping[str, Any],
        defaults: Any,
    ) -> None:
        """Keep vLLM's `config`, the `names` of the model, its `parsers`, whether it `trusts` templates, `adapters`.

        Chats are rendered with the `defaults`.
        """
        self._defaults = defaults
        self._config = config
        self._names = names
        self._adapters = adapters
        self._on_cpu = on_cpu
        self._parsers, self._trusts_templates = parsers, trusts

    def make_renderer(self) -> Any:
        """Return a renderer for the model; runs in the tokenizer's process."""
        from services.worker.vllm.forms import CheckingVllmRenderer
        from services.worker.vllm.renderer import VllmRenderer
        from services.worker.vllm.understanding import Understanding

        if self._on_cpu:
            yield_to_engine()
        config, parsers, defaults = self._config, self._parsers, self._defaults
        renderer = VllmRenderer(config, bool(parsers.tools), self._trusts_templates, defaults=defaults)
        try:
            understanding = Understanding(config, renderer.tokenizer, parsers, defaults.variables)
        except TypeError:  # the engine of these parsers will not start, and says why
            understanding = Understanding(config, renderer.tokenizer, Parsers(), defaults.variables)
        checking = CheckingVllmRenderer(
            renderer, understanding, config.model_config.max_model_len, bool(parsers.reasoning)
        )
        checking.warm_up()
        return checking

    def make_renderer_of(self, engine: VllmEngine) -> Any:
        """Return a renderer that shares the tokenizer of the engine's front-end, for the thread of its event loop.

        None where clients' templates are run, for how long one takes is nobody's to foresee, and for a tokenizer that
        is slow.
        """
        if self._trusts_templates or not getattr(engine.vllm_renderer.tokenizer, "is_fast", False):
            return None
        from services.worker.vllm.renderer import VllmRenderer

        renderer = VllmRenderer(self._config, bool(self._parsers.tools), False, engine.vllm_renderer, self._defaults)
        renderer.warm_up()
        return renderer

    def build(self, metrics_read: bool = True, forks: bool = True) -> VllmEngine:
        """Start the engine core; vLLM keeps its own metrics if they are read. Raises SystemExit(70) on failure.

        On CPU the core is a fork unless `forks` is false, as it must be where other code has run in this process: a
        fork finds locks taken, and waits for threads, of which it has none.
        """
        from vllm.envs import enable_envs_cache
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._on_cpu:
            # vLLM has set `spawn`; a fork has everything imported already, and dies with us.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if forks else "spawn"
            if self._config.model_config.enforce_eager:
                stay_eager()
        else:
            guard_process_group()
        stats = EngineStats(self._config)
        window_tokens = self._config.model_config.max_model_len
        loggers = [stats.logger] if metrics_read else [stats.logger, no_metrics()]
        try:
            with telling_of_start():
                llm = AsyncLLM.from_vllm_config(self._config, stat_loggers=loggers, disable_log_stats=True)
        except Exception as error:
            how = how_killed_at_start(error) or f"{first_line(error)} (its own lines are above)"
            fail(f"the engine did not start: {how}", EX_SOFTWARE)
        try:
            check_started(llm.vllm_config, window_tokens)
        except NotServedError as error:
            llm.shutdown()
            fail(str(error), EX_CONFIG)
        # The front-end reads a variable of the environment for every token of every request otherwise.
        enable_envs_cache()
        if self._on_cpu:
            yield_to_engine()
        try:
            return VllmEngine(llm, self._names, stats, self._parsers, self._adapters, self._defaults.variables)
        except TypeError as error:
            llm.shutdown()
            fail(first_line(error), EX_CONFIG)


def stay_eager() -> None:
    """Keep torch from compiling helper functions at their first use; engine cores forked later inherit this.

    vLLM leaves a few of them (the ranks of log probabilities, for one) to torch.compile whatever
    `--enforce-eager` says. On CPU that means a C++ compiler running for half a minute inside the first
    request that asks for log probabilities, while every other request waits.
    """
    import torch

    torch.compiler.set_stance("force_eager")


def prepare(
    model: str,
    names: tuple[str, ...],
    arguments: list[str],
    tool_parser: str = "",
    trusts_templates: bool = False,
    with_place: Callable[[str], str] = str,
) -> Prepared:
    """Read the engine's arguments with vLLM's own parser, and the model's configuration.

    `with_place` puts before what the parser says where it was given.
    Raises SystemExit(78) for wrong arguments, 70 for a model that cannot be loaded.
    """
    check_model_path(model)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        fail(f"vLLM cannot be imported ({error}): install penstock[worker-cpu] or penstock[worker-cuda]", EX_CONFIG)
    on_cpu = bool(current_platform.is_cpu())
    if on_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    found = parse_engine_arguments(["--model", model, "--served-model-name", *names, *arguments], on_cpu, with_place)
    parsers = asked_parsers(tool_parser, found)
    from huggingface_hub.errors import HFValidationError
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        config = AsyncEngineArgs.from_cli_args(found).create_engine_config()
    except (OSError, RuntimeError, HFValidationError) as error:
        # Whatever keeps the hub, or a file, from being read is an OSError: no such model, no access to it, no network.
        here = "" if Path(model).exists() else f"; there is no directory {model} here either"
        fail(f"cannot load the model {model}: {first_line(error)}{here}", EX_SOFTWARE)
    except KeyError as error:  # a parser's name
        fail(f"the engine's arguments do not fit: {error.args[0] if error.args else error}", EX_CONFIG)
    except ValueError as error:
        fail(f"the engine's arguments do not fit: {first_line(error)}", EX_CONFIG)
    from services.worker.vllm.adapters import adapters_of
    from services.worker.vllm.templates import chat_defaults

    try:
        defaults = chat_defaults(found)
        check_arguments(config, parsers.reasoning)
        adapters = adapters_of(config, found.lora_modules, names)
    except NotServedError as error:
        fail(f"the engine's arguments do not fit: {error}", EX_CONFIG)
    from services.worker.vllm.scheduling import let_guaranteed_pass
    from services.worker.vllm.seeds import have_rewound

    let_guaranteed_pass(config)
    have_rewound(config)
    if config.model_config.is_hybrid:
        # Layers with a state cannot share the blocks of those with attention: vLLM would not start.
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return Prepared(config, names, on_cpu, parsers, trusts_templates, adapters, defaults)


class VllmEngine:
    """AsyncLLM behind the worker's engine protocol."""

    def __init__(
        self,
        llm: Any,
        names: tuple[str, ...],
        stats: EngineStats,
        parsers: Parsers,
        adapters: Mapping[str, Any],
        variables: Mapping[str, Any],
    ) -> None:
        """Serve `llm` and its `adapters`; templates of chats have the `variables` by default.

        Raises TypeError if the `parsers` cannot work with its tokenizer.
        """
        from services.worker.vllm.understanding import Understanding

        self._llm = llm
        self._adapters = adapters
        self._stats = stats
        stats.find_shared(Sharing(llm.vllm_config, getattr(llm, "output_processor", None)).blocks)
        self._pace = Pace(llm)
        self._understanding = Understanding(llm.vllm_config, llm.get_tokenizer(), parsers, variables)
        self._shape = self._describe(names, bool(parsers.reasoning))
        config = llm.vllm_config
        self._loads = bool(config.kv_transfer_config or config.ec_transfer_config)
        self._watch: asyncio.Task[None] | None = None

    @property
    def vllm_renderer(self) -> Any:
        """vLLM's own renderer of the front-end."""
        return self._llm.renderer

    @property
    def shape(self) -> EngineShape:
        """What the engine can hold."""
        return self._shape

    def _describe(self, names: tuple[str, ...], tells_reasoning: bool) -> EngineShape:
        from services.worker.vllm.renderer import byte_bound
        from services.worker.vllm.scheduling import goes_by_priority

        config = self._llm.vllm_config
        model_config = config.model_config
        bounded, special = byte_bound(self._llm.get_tokenizer())
        return EngineShape(
            engine="vllm",
            blocks_total=self._stats.blocks_total,
            block_size=config.cache_config.block_size,
            max_model_len=model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            # A block that does not grow is booked as one more that does: the tokens of it are ahead of the output.
            lookahead_tokens=lookahead_tokens(config) + state_blocks(config) * config.cache_config.block_size,
            model=names[0],
            model_aliases=(*names[1:], *self._adapters),
            byte_bounded_tokenizer=bounded,
            special_tokens=special,
            default_max_tokens=self._understanding.limits.default,
            ceiling_max_tokens=self._understanding.limits.ceiling,
            tells_reasoning=tells_reasoning,
            guaranteed_first=goes_by_priority(config),
            adapters=tuple(self._adapters),
            most_blocks=most_blocks(config),
        )

    def start(
        self,
        on_stats: Callable[[EngineReported], None],
        on_death: Callable[[str], None],
        on_tokens: Callable[[StepTokens], None],
    ) -> None:
        """Begin to work on the running loop."""
        self._stats.sink = on_stats
        self._stats.token_sink = on_tokens
        self._watch = asyncio.get_running_loop().create_task(self._watch_health(on_death), name="engine-health")

    async def _watch_health(self, on_death: Callable[[str], None]) -> None:
        """Load the adapters, then notice the death of an engine that runs nothing; a running one fails its requests."""
        from services.worker.vllm.adapters import load

        try:
            await load(self._llm, self._adapters)
        except RuntimeError as error:
            on_death(first_line(error))
            return
        while True:
            try:
                await self._llm.check_health()
            except Exception:
                on_death(how_core_ended(self._llm))
                return
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineStep]:
        """Run a request.

        Raises EngineDeadError, RequestRefusedError for what vLLM refuses, and whatever else ended this run alone.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        from services.worker.vllm.logprobs import PromptLogprobs, most_held_back
        from services.worker.vllm.sampling import COMPLAINTS, engine_step, refuse_dead_end

        run_id = request.run_id
        params, message = self._understanding.of(request)
        said: dict[str, Any] = {} if message is None else message.of_engine()
        said["priority"] = priority_of(request.guaranteed)
        said["lora_request"] = self._adapters.get(request.model)
        interval = self._pace.begin(run_id, request.tell_at_tokens, most_held_back(params))
        if interval is not None:
            params.stream_interval = interval
        outputs = self._llm.generate(tokens_input(list(request.prompt_ids)), params, run_id, **said)
        of_prompt = PromptLogprobs(params.prompt_logprobs, self._llm.get_tokenizer().decode)
        preemptions = RunPreemptions(getattr(self._llm, "output_processor", None), run_id)
        first = True
        try:
            async for output in outputs:
                self._pace.handed_over(run_id, request.tell_at_tokens, first)
                for piece in of_prompt.pieces(output):
                    yield piece
                    await asyncio.sleep(0)
                step = engine_step(output, params.logprobs, preemptions.count(output))
                refuse_dead_end(step, params, first, self._loads)
                first = False
                yield step if message is None else message.read(step)
        except VllmDeadError as error:
            raise EngineDeadError(how_core_ended(self._llm)) from error
        except VLLMClientError as error:
            raise self._understanding.refusal_of(error, params) from error
        except EngineGenerateError as error:
            if self._llm.errored:
                # What ended vLLM's own loop is raised in every run, whichever of them it came of.
                raise EngineDeadError(first_line(error.__cause__ or error)) from error
            # A run that could not be told to the core stays in the front-end's records for good otherwise.
            await self.abort(run_id)
            # vLLM wraps what its own checks of the parameters raise: complaints, and what else may end them.
            if isinstance(error.__cause__, COMPLAINTS):
                raise self._understanding.refusal_of(error.__cause__, params) from error
            self._understanding.verify(params)
            raise error.__cause__ or error from None  # the wrapper says nothing
        finally:
            self._pace.end(run_id)
            await outputs.aclose()

    def tell_at(self, run_id: str, tokens: int) -> None:
        """Change how often a run is handed over."""
        self._pace.change(run_id, tokens)

    async def abort(self, run_id: str) -> None:
        """Abort a run. Raises EngineDeadError."""
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        try:
            await self._llm.abort(run_id)
        except VllmDeadError as error:
            raise EngineDeadError(how_core_ended(self._llm)) from error

    async def close(self, within_s: float = ENGINE_END_S) -> None:
        """Stop the engine core; kill it if it has not ended within so many seconds."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        # vLLM's output loop takes the end of its core for a crash and logs a traceback; end the loop first.
        outputs = getattr(self._llm, "output_handler", None)
        if outputs is not None:
            outputs.cancel()
        await asyncio.to_thread(self._llm.shutdown, timeout=within_s)
