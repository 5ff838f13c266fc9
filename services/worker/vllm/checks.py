"""What vLLM would start with, and Penstock serve wrongly: it is refused with the reason instead."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.server_flags import ADMISSION, wrong_here

UNLIKE_TEMPLATES = ("openai_gptoss", "kimi_k3")
"""Parsers of models whose chats vLLM's server writes otherwise than their templates do."""

SLACK = 1.05
"""vLLM's figure of how many whole windows fit is rounded; a second group of layers is at least half of the first."""


class NotServedError(Exception):
    """The engine's arguments, or its model, cannot be served; the text says why and what to do."""


class Parsers(NamedTuple):
    """Names of vLLM's parsers that read answers as messages; empty for none."""

    tools: str = ""
    reasoning: str = ""


def asked_reasoning_parser(found: Any) -> str:
    """Return the reasoning parser that parsed arguments name, in either place, or "".

    Raises NotServedError if they name a plug-in.

    To be asked before vLLM makes a configuration of them: it writes the parser that belongs to a model (gpt-oss has
    one) into the same object.
    """
    outputs = found.structured_outputs_config
    inside = outputs if isinstance(outputs, dict) else vars(outputs)
    if found.reasoning_parser_plugin or inside.get("reasoning_parser_plugin"):
        raise NotServedError("--reasoning-parser-plugin: parsers are vLLM's own, as those of --tool-call-parser")
    return found.reasoning_parser or inside.get("reasoning_parser") or ""


def check_arguments(config: Any, reasoning_parser: str) -> None:
    """Look at vLLM's configuration, and the parser asked for, before anything is started. Raises NotServedError."""
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate":
        whose = "this model's is that, and " if model.runner == "auto" else ""
        raise NotServedError(f"--runner {model.runner_type}: {whose}only models that generate text are served")
    if model.is_encoder_decoder:
        raise NotServedError(f"--model: {model.model} has an encoder, and what that caches is not booked")
    if parallel.data_parallel_size > 1:
        raise NotServedError(
            f"--data-parallel-size {parallel.data_parallel_size}: each of its engines has a cache of its own, and a "
            "worker's blocks are those of one; start a worker for each instead"
        )
    if parallel.pipeline_parallel_size > 1 and config.device_config.device_type == "cpu":
        raise NotServedError("--pipeline-parallel-size: vLLM on a CPU fails with it at the first request")
    if model.skip_tokenizer_init:
        raise NotServedError("--skip-tokenizer-init: prompts are counted, and answers written, by the tokenizer")
    for name in ADMISSION:  # a configuration file of vLLM's own may have it, too
        if getattr(config.scheduler_config, name.replace("-", "_")) is not None:
            raise NotServedError(f"--{name} {wrong_here(name)}")
    if reasoning_parser and (reasoning_parser in UNLIKE_TEMPLATES or model.hf_config.model_type == "gpt_oss"):
        raise NotServedError("--reasoning-parser: what gpt-oss and Kimi-K3 think is not told apart")


def check_started(config: Any, window_tokens: int) -> None:
    """Look at what vLLM has made of a configuration whose window was `window_tokens`. Raises NotServedError."""
    fitted_tokens = config.model_config.max_model_len
    if fitted_tokens != window_tokens:
        # The tokenizers, which are forked before the engine starts, cut and refuse prompts by it.
        raise NotServedError(f"--max-model-len auto: {fitted_tokens} tokens fit here; give that number")
    cache = config.cache_config
    if not cache.kv_cache_max_concurrency or config.model_config.is_hybrid:
        return  # what layers with a state take is booked (`state_blocks`)
    held, booked = cache.num_gpu_blocks / cache.kv_cache_max_concurrency, -(-window_tokens // cache.block_size)
    # Where all layers slide alike vLLM counts a block more, for a window that begins inside of one: `booked + 1`. Two
    # groups take 1.5 times `booked` or more, which is beyond the slack of that from three blocks on.
    if held > SLACK * (booked + 1):
        raise NotServedError(
            f"the model's layers have KV caches of several kinds: a window of {window_tokens} tokens takes {held:.0f} "
            f"blocks, and {booked} are booked for it (where all layers have attention, leave out "
            "--no-disable-hybrid-kv-cache-manager)"
        )
