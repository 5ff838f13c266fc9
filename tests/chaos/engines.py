"""What the workers run, and the batch that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CLIENTS = 2
"""Two, so that one goes on while the other is down."""


class Engine(NamedTuple):
    """Flags of the workers, and the size of the batch."""

    flags: Sequence[str]
    needs_model: bool
    requests: int
    distinct: int
    """Different prompts. With fewer than requests, prompts come again, and the fault-free run is so much shorter."""
    most_tokens: int
    parts: int
    """Files of each client, one after the other."""
    workers: int = 2


VLLM = Engine(
    [
        "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--block-size", "32", "--num-gpu-blocks-override", "257", "--engine-threads", "1", "--max-num-seqs", "8",
    ],
    True, 3000, 3000, 160, 4,
)  # fmt: skip
"""Few sequences at a time, so that what one lost worker had in hand is little beside 3,000 short requests."""

SIMULATED = Engine(
    ["--engine", "simulated", "--served-model-name", "tiny", "--max-num-seqs", "32"], False, 100_000, 2000, 16, 8
)

SLOW = Engine(
    [
        "--engine", "simulated", "--served-model-name", "tiny", "--max-num-seqs", "2", "--max-num-batched-tokens",
        "512", "--profile", "cpu-tiny",
    ],
    False, 200, 200, 40, 1,
)  # fmt: skip
"""Simulated, and slow enough for eight kills to meet 200 requests."""
