"""A batch file whose request lengths follow a trace, for the tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.traces import Workload

WORDS = (
    "water", "gate", "wheel", "river", "stone", "light", "morning", "answer", "letter", "window",
    "garden", "turbine", "credit", "block", "queue", "channel", "lease", "grant", "worker", "engine",
    "token", "prompt", "number", "table", "paper", "bridge", "forest", "winter", "summer", "evening",
    "machine",
)  # fmt: skip


def batch_lines(workload: Workload, tokenizer_file: Path, max_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return one /v1/completions line per length.

    Prompts are text of the wanted number of tokens (give or take a token at the cut); every request asks for
    `max_tokens` and really ends after its own length (see force_length.py).
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rng = random.Random(seed)
    return [
        {
            "custom_id": f"request-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "tiny",
                "prompt": text_of_length(tokenizer, rng, length.prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "vllm_xargs": {"output_tokens": min(length.output, max_tokens)},
            },
        }
        for index, length in enumerate(workload.lengths)
    ]


def text_of_length(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> str:
    """Return random words of about `tokens` tokens."""
    text = " ".join(rng.choices(WORDS, k=tokens))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    return str(tokenizer.decode(ids))


def write(lines: list[dict[str, Any]], path: Path) -> Path:
    """Write lines as a JSONL file and return its path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
