"""How long one step of an engine takes: fitted to a real one, or derived from a GPU's published figures.

docs/engine-model.md shows the formulas, the sources and the errors.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Load(Protocol):
    """What a step computed; a `StepResult` is one."""

    @property
    def decoding(self) -> int: ...  # noqa: D102
    @property
    def prefill_tokens(self) -> int: ...  # noqa: D102
    @property
    def prefills(self) -> int: ...  # noqa: D102
    @property
    def kv_tokens_read(self) -> int: ...  # noqa: D102
    @property
    def attended_tokens(self) -> int: ...  # noqa: D102


class Profile(Protocol):
    """Speed of an engine, and its size where the profile implies one."""

    @property
    def num_blocks(self) -> int | None:
        """KV blocks of 16 tokens that fit beside the weights; None if the profile is about speed only."""

    def step_s(self, load: Load) -> float:
        """Return the seconds a step takes."""


class Fitted(NamedTuple):
    """Seconds linear in the load; the coefficients are a least-squares fit to a real engine's steps."""

    step: float
    """Any step."""
    per_sequence: float = 0.0
    """Each sequence of it: sampling, input preparation, output handling."""
    per_prefill_token: float = 0.0
    per_kv_token: float = 0.0
    """Each token of context of each sequence."""
    num_blocks: int | None = None

    def step_s(self, load: Load) -> float:
        """Return the seconds a step takes."""
        return (
            self.step
            + self.per_sequence * (load.decoding + load.prefills)
            + self.per_prefill_token * load.prefill_tokens
            + self.per_kv_token * load.kv_tokens_read
        )


class Gpu(NamedTuple):
    """One accelerator, as its data sheet has it; what it calls GB of memory are GiB, by what the driver reports."""

    memory_gib: float
    bandwidth_tb_s: float
    dense_bf16_tflops: float


class Model(NamedTuple):
    """A dense decoder in bf16, as its configuration file has it."""

    parameters: float
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Two bytes a parameter."""
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value, two bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def flops_per_token(self) -> float:
        """A multiplication and an addition for each parameter."""
        return 2 * self.parameters

    @property
    def flops_per_attended_token(self) -> int:
        """Query times key and score times value, each a multiplication and an addition per element."""
        return 4 * self.layers * self.attention_heads * self.head_dim


MEMORY_UTILIZATION = 0.92
"""Share of the memory the engine takes: the default of `--gpu-memory-utilization` in vLLM 0.32."""

BLOCK_SIZE = 16
"""Tokens of a block: vLLM 0.32's default (`CacheConfig.DEFAULT_BLOCK_SIZE`)."""


class Assumed(NamedTuple):
    """What neither data sheets nor configuration files say: round numbers.

    `python -m benchmarks.admission.sensitivity` varies them.
    """

    bandwidth_efficiency: float = 0.80
    """Share of the data sheet's memory bandwidth that a decode step reaches."""
    compute_efficiency: float = 0.55
    """Share of the data sheet's dense bf16 peak that a prefill reaches."""
    overhead_s: float = 0.002
    """Time of a step outside the kernels: scheduling, input preparation, launches, sampling."""
    all_reduce_s: float = 15e-6
    """One all-reduce of a small batch between the GPUs of a node; two a layer."""
    activation_gib: float = 2.0
    """Memory for activations and graphs on each GPU, beside weights and KV blocks."""


class Roofline(NamedTuple):
    """Seconds of a step by the slower of memory and arithmetic: derived, and held against one real GPU.

    `python -m benchmarks.fit_engine --profile h200-llama-8b` measures the error there.
    """

    gpu: Gpu
    model: Model
    tensor_parallel: int = 1
    assumed: Assumed = Assumed()

    @property
    def num_blocks(self) -> int:
        """Blocks in what memory is left beside the weights and the activations."""
        usable_gib = (self.gpu.memory_gib * MEMORY_UTILIZATION - self.assumed.activation_gib) * self.tensor_parallel
        return int((usable_gib * 2**30 - self.model.weight_bytes) / (self.model.kv_bytes_per_token * BLOCK_SIZE))

    def step_s(self, load: Load) -> float:
        """Return the seconds a step takes."""
        model, gpu, assumed = self.model, self.gpu, self.assumed
        read_bytes = model.weight_bytes + load.kv_tokens_read * model.kv_bytes_per_token
        memory_s = read_bytes / (gpu.bandwidth_tb_s * 1e12 * self.tensor_parallel * assumed.bandwidth_efficiency)
        tokens = load.decoding + load.prefill_tokens
        flops = tokens * model.flops_per_token + load.attended_tokens * model.flops_per_attended_token
        compute_s = flops / (gpu.dense_bf16_tflops * 1e12 * self.tensor_parallel * assumed.compute_efficiency)
        exchange_s = 2 * model.layers * assumed.all_reduce_s if self.tensor_parallel > 1 else 0.0
        return max(memory_s, compute_s) + exchange_s + assumed.overhead_s


A100_80GB = Gpu(80, 2.039, 312)
"""SXM."""

H100_80GB = Gpu(80, 3.35, 989)
"""SXM."""

H200_141GB = Gpu(141, 4.8, 989)
"""SXM."""

LLAMA_8B = Model(8.03e9, 32, 32, 8, 128)
LLAMA_70B = Model(70.6e9, 80, 64, 8, 128)

CPU_TINY = Fitted(0.0044, 8.12e-5, 2.34e-5, 3.79e-7)
"""`make fit-engine`: on held-out steps the total is off by 1 %, the median step by 12 %, one in ten by 37 % or more."""

H200_LLAMA_8B = Fitted(0.00666, 2.67e-5, 2.32e-5, 4.19e-8, 57_382)
"""A fit to one H200 (`python -m benchmarks.fit_engine --profile h200-llama-8b`) and the blocks vLLM found room for: on
held-out steps the total is off by 0.2 %, the median step by 5 %."""

PROFILES: dict[str, Profile] = {
    "instant": Fitted(0.0),
    "cpu-tiny": CPU_TINY,
    "cpu-small": Fitted(0.0023, 1.06e-4, 1 / 17_000),
    "a100-llama-8b": Roofline(A100_80GB, LLAMA_8B),
    "h100-llama-8b": Roofline(H100_80GB, LLAMA_8B),
    "h200-llama-8b": Roofline(H200_141GB, LLAMA_8B),
    "h200-llama-8b-measured": H200_LLAMA_8B,
    "h200-llama-70b-tp8": Roofline(H200_141GB, LLAMA_70B, 8),
}
"""Names for `--profile`."""
