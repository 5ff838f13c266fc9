"""What an engine of the benchmarks is told on each kind of device, whatever is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

CAPTURED_TOKENS = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(640, 2049, 128))
"""Tokens of a step that are captured as CUDA graphs; steps between are padded to the next. What has more keeps a GPU at
work for longer than its launches take."""

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": CAPTURED_TOKENS}
"""vLLM's compilation configuration. Steps are CUDA graphs, as by default: whole ones where all decode, and around
attention where somebody's prompt is computed. By default the model is compiled as well and steps above 512 tokens are
not captured; a compiler would take minutes for each engine here, and change all policies alike."""


class Device(NamedTuple):
    """A kind of device: its number format, the classes for vLLM's model runner and scheduler there, and flags."""

    dtype: str
    logits_processor: str
    recorder: str
    flags: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})


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
        json.dumps(GRAPHS),
        # Of the whole GPU, for each of several engines on it; what the cache has is given in bytes.
        "--gpu-memory-utilization",
        "0.25",
    ),
    # Graphs around attention without a compiler to cut the model there.
    MappingProxyType({"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
)
"""vLLM's CUDA build: its second model runner, the next step scheduled while one runs."""
