"""The models of the benchmarks on real vLLM: random weights, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.devices import CPU, CUDA, Device
from benchmarks.stack import penstock

BFLOAT16_BYTES = 2


class Model(NamedTuple):
    """The options of `penstock tiny-model`, what of the configuration is different, and what the model runs on."""

    options: tuple[str, ...]
    configuration: Mapping[str, Any] = MappingProxyType({})
    device: Device = CPU

    @property
    def flags(self) -> tuple[str, ...]:
        """The engine's arguments about the weights: those of a model of another shape are vLLM's to make up."""
        return ("--load-format", "dummy") if self.configuration else ()

    def kv_flags(self, blocks: int, block_size: int) -> tuple[str, ...]:
        """The engine's arguments about the memory of its cache; vLLM's number of blocks counts the null block.

        On a GPU the bytes are named too: engines that start side by side could not measure what is free.
        """
        flags = ("--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks + 1))
        if self.device is CPU:
            return flags
        names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        layers, heads, width = (self.configuration[name] for name in names)
        token_bytes = 2 * BFLOAT16_BYTES * layers * heads * width
        return (*flags, "--kv-cache-memory-bytes", str((blocks + 1) * block_size * token_bytes))


LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
}
"""The shape of Llama 3.1 8B, as in its `config.json`."""

MODELS = {
    "tiny": Model(("--layers", "2", "--hidden-size", "128")),
    "small": Model(("--layers", "4", "--hidden-size", "256")),
    "deep": Model(("--layers", "12", "--hidden-size", "128")),
    "m512": Model(("--layers", "4", "--hidden-size", "512")),
    "llama-8b": Model((), LLAMA_8B, CUDA),
}
"""`tiny` has steps of a fixed cost, and little more for every request in the batch, but they take 2 to 3 ms: a tenth
of those of a model in production, so that whatever shares its processors weighs ten times as much. Those of `m512`
take as long as an accelerator's (20 to 30 ms with fifty requests), but are arithmetic that a CPU does request by
request: a larger batch pays less than it would there. `deep` is twelve layers as thin as those of `tiny`: steps of 10
to 20 ms that cost little more for every request, as where they wait for the memory that holds the weights. `llama-8b`
needs a GPU: its steps cost what a production model's do, only what it writes means nothing."""


def make_model(directory: Path, name: str, window_tokens: int) -> None:
    """Make the model `name` for so many tokens of prompt and output in `directory`."""
    model = MODELS[name]
    penstock(
        "tiny-model", str(directory), *model.options, "--dtype", model.device.dtype,
        "--max-position", str(window_tokens),
    )  # fmt: skip
    if model.configuration:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **model.configuration}))
