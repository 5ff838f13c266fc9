"""What an engine of the benchmarks is told on each kind of device, whatever is measured."""

from __future__ import annotations

import json
from typing import NamedTuple

CAPTURED_BATCHES = (1, 2, 4, 8, *range(16, 257, 16))
"""Batch sizes whose decode steps are captured as CUDA graphs; those between are padded to the next."""

DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED_BATCHES}
"""vLLM's compilation configuration: decode steps are CUDA graphs, as by default; nothing is compiled, which would take
minutes for each engine and change all policies alike."""


class Device(NamedTuple):
    """A kind of device: its number format, the classes for vLLM's model runner and scheduler there, and flags."""

    dtype: str
    logits_processor: str
    recorder: str
    flags: tuple[str, ...]


CPU = Device(
    "float32", "benchmarks.force_length:ForceLength", "benchmarks.admission.recorder.Recorder", ("--enforce-eager",)
)
"""vLLM's CPU build: its first model runner, one step after the other."""

CUDA = Device(
    "bfloat16",
    "benchmarks.force_length_v2:ForceLength",
    "benchmarks.admission.recorder.AsyncRecorder",
    (
        "--compilation-config",
        json.dumps(DECODE_GRAPHS),
        # Of the whole GPU, for each of several engines on it; what the cache has is given in bytes.
        "--gpu-memory-utilization",
        "0.25",
    ),
)
"""vLLM's CUDA build: its second model runner, the next step scheduled while one runs."""
