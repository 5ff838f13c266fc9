"""A LoRA adapter with random weights for the tiny model, in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.tiny_model import Shape

RANK = 4
PARTS = ("q_proj", "v_proj")


def make_adapter(directory: Path, seed: int = 0, rank: int = RANK, shape: Shape | None = None) -> Path:
    """Write an adapter for a tiny model of `shape` to `directory` and return it."""
    import numpy as np
    from safetensors.numpy import save_file

    shape, random = shape or Shape(), np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape.layers):
        for part in PARTS:
            at = f"base_model.model.model.layers.{layer}.self_attn.{part}.lora_"
            for name, size in (("A", (rank, shape.hidden_size)), ("B", (shape.hidden_size, rank))):
                tensors[f"{at}{name}.weight"] = (random.standard_normal(size) * 0.3).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": PARTS, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
