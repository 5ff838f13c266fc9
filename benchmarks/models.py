"""The models of the benchmarks on real vLLM: random weights, made on the spot, in three sizes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_main import penstock

DTYPE = "float32"
"""Of weights and engine alike."""

MODELS = {
    "tiny": ("--layers", "2", "--hidden-size", "128"),
    "small": ("--layers", "4", "--hidden-size", "256"),
    "m512": ("--layers", "4", "--hidden-size", "512"),
}
"""`tiny` has steps of a fixed cost, and little more for every request in the batch, but they take 2 to 3 ms: a tenth
of those of a model in production, so that whatever shares its processors weighs ten times as much. Those of `m512`
take as long as an accelerator's (20 to 30 ms with fifty requests), but are arithmetic that a CPU does request by
request: a larger batch pays less than it would there."""


def make_model(directory: Path, name: str, window_tokens: int) -> None:
    """Make the model `name` for so many tokens of prompt and output in `directory`."""
    penstock("tiny-model", str(directory), *MODELS[name], "--dtype", DTYPE, "--max-position", str(window_tokens))
