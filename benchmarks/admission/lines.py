"""A workload as text: batch lines for real engines; prompts have the wanted lengths and share what they should."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.admission.workloads import Item, Workload
from benchmarks.workload import WORDS


class Prompts:
    """Makes prompts; words are chosen so that a piece of a prompt has the same tokens wherever it stands."""

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        """Draw words by `seed`."""
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._seed = seed
        # Words that are one token each with the space before them need no cutting and join anywhere.
        self._words = [word for word in WORDS if len(self._ids(f" {word}")) == 1] or list(WORDS)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, index: int, item: Item, prefix_tokens: int) -> str:
        """Return a prompt of the item's length, the token put before it by the engine's tokenizer included."""
        wanted = item.prompt_tokens - 1
        words: list[str] = []
        for piece in item.prefix:
            if len(words) + prefix_tokens > wanted:
                break
            words += random.Random(f"{self._seed}:{piece}").choices(self._words, k=prefix_tokens)
        words += random.Random(f"{self._seed}-{index}").choices(self._words, k=wanted - len(words))
        return "".join(f" {word}" for word in words) or " "


def batch_lines(workload: Workload, tokenizer_file: Path, seed: int) -> list[dict[str, Any]]:
    """Return one /v1/completions line per item. Each ends after its own length (force_length.py), and names itself."""
    prompts = Prompts(tokenizer_file, seed)
    return [
        {
            "custom_id": f"item-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "tiny",
                "prompt": prompts.text(index, item, workload.prefix_tokens),
                "max_tokens": item.max_tokens,
                "temperature": 0,
                "vllm_xargs": {"output_tokens": item.output_tokens, "item": index},
            },
        }
        for index, item in enumerate(workload.items)
    ]
