"""LoRA adapters: small changes of the model's weights, each served under a name of its own beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.launchers.cli_args import LoRAParserAction
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from services.worker.engine import RequestRefusedError
from services.worker.vllm.checks import NotServedError

FLAG = "--lora-modules"
"""As vLLM's server has it; it is none of the engine's arguments."""


def add_flag(parser: Any) -> None:
    """Let a parser of the engine's arguments take `--lora-modules NAME=PATH …`, or JSON, as vLLM's server does."""
    parser.add_argument(FLAG, nargs="+", action=LoRAParserAction, default=[])


def adapters_of(config: Any, modules: Sequence[Any], names: Sequence[str]) -> dict[str, LoRARequest]:
    """Return the adapters by their names, for vLLM's `config` of a model that has the `names`.

    Raises NotServedError if one cannot be served; whether its weights fit shows when they are loaded.
    """
    if not modules:
        return {}
    if config.lora_config is None:
        raise NotServedError(f"{FLAG}: adapters need --enable-lora")
    if config.device_config.device_type == "cpu" and config.lora_config.max_loras <= len(modules):
        # To vLLM's operators there -1, which stands for none, is the index of the last place (vLLM's pull request
        # 48421): what is empty changes nothing.
        raise NotServedError(
            f"{FLAG}: {len(modules)} adapters need --max-loras {len(modules) + 1} on a CPU, where vLLM gives requests "
            "without an adapter the one in its last place"
        )
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, 1):
        where = f"{FLAG} {module.name}"
        if not module.name or module.name in names or module.name in adapters:
            raise NotServedError(f"{where}: every adapter needs a name of its own")
        path = get_adapter_absolute_path(module.path)
        try:
            PEFTHelper.from_local_dir(path, config.model_config.max_model_len).validate_legal(config.lora_config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotServedError(f"{where}: {error}") from None
        adapters[module.name] = LoRARequest(
            module.name, number, path, module.base_model_name, is_3d_lora_weight=module.is_3d_lora_weight
        )
    return adapters


def refuse_prompt_logprobs(config: Any, asked: bool, by_echo: bool) -> None:
    """Raise RequestRefusedError if log probabilities of the prompt are asked of an engine that would end of it.

    vLLM's operators for adapters on a CPU take the rows of a prompt for those of the running requests, and find more.
    They do so for every model of an engine with `--enable-lora`, that without an adapter as well.
    """
    if asked and config.lora_config is not None and config.device_config.device_type == "cpu":
        what = "echo with logprobs" if by_echo else "prompt_logprobs"
        text = f"{what}: vLLM on a CPU cannot give the log probabilities of a prompt with --enable-lora"
        raise RequestRefusedError("unsupported_parameter", text, "echo" if by_echo else "sampling.prompt_logprobs")


async def load(llm: Any, adapters: Mapping[str, LoRARequest]) -> None:
    """Have the engine of `llm` load every adapter: one it could not load would end it at its first request.

    Raises RuntimeError that names the adapter.
    """
    for name, adapter in adapters.items():
        try:
            await llm.add_lora(adapter)
        except Exception as error:
            raise RuntimeError(f"{FLAG} {name} cannot be loaded: {error}") from error
