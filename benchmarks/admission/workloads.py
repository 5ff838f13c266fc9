"""Named workloads: the same requests for every policy, in order of arrival, seeded.

Lengths come from production traces where a workload names one, scaled by one factor to the window of a scale.
Every pool is a few windows large: fewer, and one long request decides everything; many more, and the cache is
not what is scarce.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks import traces
from services.worker.simulated.profile import PROFILES, Profile

MOONCAKE_FILE = "mooncake_conversation.jsonl"
MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens that one hash id of the Mooncake trace stands for."""

AZURE_WINDOW_TOKENS = 16_384
"""Holds the longest request of the Azure trace, 14,050 + 1,000 tokens."""


CHANNEL = "default"
"""Of requests where there is no other."""

BYTES_PER_TOKEN = 4.0
"""Of a prompt's text, as English has it under a common vocabulary."""


@dataclass(frozen=True)
class Shape:
    """Sizes and speed of the engines a workload runs on; blocks as usable, without vLLM's null block."""

    window_tokens: int
    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    profile: str
    speed: Profile
    prefix_caching: bool = False


@dataclass(frozen=True)
class Item:
    """One request. `max_tokens` is what the client asks for; it really ends after `output_tokens`.

    `prefix` names the prompt's leading pieces of the workload's `prefix_tokens` each: equal names, equal tokens, and
    a name says all that comes before it. `keys` names the full blocks in them likewise.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    channel: str = CHANNEL
    bytes_per_token: float = BYTES_PER_TOKEN

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the prompt's text, which has a token fewer: the tokenizer puts one before it."""
        return max(round(self.bytes_per_token * (self.prompt_tokens - 1)), 1)


@dataclass(frozen=True)
class Workload:
    """Requests, when they come, and what they run on.

    `load` is the arrival rate as a share of what pushing everything completes; None lets all arrive at once.
    `gaps` are the times between arrivals in means of themselves.
    """

    name: str
    items: list[Item]
    shape: Shape
    source: str
    load: float | None = None
    gaps: tuple[float, ...] = ()
    prefix_tokens: int = 0

    def arrivals_s(self, push_rps: float) -> list[float]:
        """Return when each request arrives if pushing everything at once completes `push_rps` requests a second."""
        if self.load is None:
            return [0.0] * len(self.items)
        mean_gap_s = 1 / (self.load * push_rps)
        moments, now = [], 0.0
        for gap in self.gaps:
            moments.append(now)
            now += gap * mean_gap_s
        return moments


@dataclass(frozen=True)
class Scale:
    """A family of shapes: what the windows are multiplied by, and what the engine is.

    `factor` multiplies every length of a workload; `pool_windows` is the pool in windows, 0 what the profile's GPU
    has beside its weights. `speed` is the profile's unless another is given.
    """

    name: str
    factor: float
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    profile: str
    pool_windows: float = 4
    speed: Profile | None = None

    def tokens(self, full: float) -> int:
        """Return a length of the full scale at this one."""
        return max(round(full * self.factor), 1)

    def shape(self, window: int) -> Shape:
        """Return the engine with a window of so many tokens at full scale, and the pool in windows of this scale."""
        window_tokens = -(-self.tokens(window) // self.block_size) * self.block_size
        speed = self.speed or PROFILES[self.profile]
        blocks = int(self.pool_windows * window_tokens) // self.block_size or speed.num_blocks
        if not blocks:
            raise ValueError(f"the profile {self.profile} does not say how many blocks it has")
        sequences, batched_tokens = self.max_num_seqs, self.max_num_batched_tokens
        return Shape(window_tokens, self.block_size, blocks, sequences, batched_tokens, self.profile, speed)


SCALES = {
    "cpu": Scale("cpu", 1 / 4, 32, 256, 2048, "cpu-small"),
    "gpu": Scale("gpu", 1.0, 16, 1024, 8192, "h100-llama-8b"),
    "gpu-half": Scale("gpu-half", 1 / 2, 16, 256, 8192, "h100-llama-8b"),
}
"""`cpu` is what real vLLM runs here (its CPU backend has no blocks smaller than 32), `gpu` the traces' own scale, and
`gpu-half` what several real engines on one GPU run in minutes."""


def kv_bound(count: int, scale: Scale, seed: int) -> Workload:
    """Return the acceptance workload: a trace's lengths, `max_tokens` four times the mean output, all at once.

    Outputs longer than `max_tokens` are cut by it, as they would be.
    """
    return _azure("kv-bound", count, scale, seed, 4.0)


def loose_max_tokens(count: int, scale: Scale, seed: int) -> Workload:
    """Return a trace's lengths with `max_tokens` sixteen times the mean output."""
    return _azure("loose-max-tokens", count, scale, seed, 16.0)


def azure(count: int, scale: Scale, seed: int) -> Workload:
    """Return a trace's lengths in its own rhythm of arrivals, a tenth more than pushing completes."""
    workload = _azure("azure", count, scale, seed, 4.0)
    return replace(workload, load=1.1, gaps=_azure_gaps(count, seed))


def _azure(name: str, count: int, scale: Scale, seed: int, looseness: float) -> Workload:
    shape = scale.shape(AZURE_WINDOW_TOKENS)
    found = traces.load(count, scale.factor, shape.window_tokens, shape.window_tokens, seed)
    mean_output = sum(length.output for length in found.lengths) / count
    max_tokens = round(looseness * mean_output)
    items = [_fitting(length.prompt, length.output, max_tokens, shape) for length in found.lengths]
    return Workload(name, items, shape, f"{found.source}; max_tokens {max_tokens}")


def _fitting(prompt: int, output: int, max_tokens: int, shape: Shape) -> Item:
    """Return the request, cut as vLLM cuts: a prompt leaves room for a token, prompt and output fit the window."""
    prompt = min(prompt, shape.window_tokens - min(max_tokens, shape.window_tokens // 2))
    return Item(prompt, min(output, max_tokens, shape.window_tokens - prompt), max_tokens)


def _azure_gaps(count: int, seed: int) -> tuple[float, ...]:
    moments = traces.moments_s(count, seed)
    gaps = [after - before for before, after in pairwise(moments)] + [0.0]
    mean = sum(gaps) / (count - 1) if count > 1 else 1.0
    return tuple(gap / mean for gap in gaps)


def mooncake(count: int, scale: Scale, seed: int) -> Workload:
    """Return the Mooncake conversation trace: long prompts, many of which begin as an earlier one did."""
    # A window of 32K keeps nine prompts in ten; longer ones are left out, for cut ones would share less.
    shape = scale.shape(32768)
    shape = replace(shape, prefix_caching=True)
    prefix_tokens = scale.tokens(MOONCAKE_BLOCK_TOKENS)
    per_piece = prefix_tokens // shape.block_size
    path = Path(os.environ.get("PENSTOCK_TRACES", traces.DEFAULT_DIRECTORY)) / MOONCAKE_FILE
    if not path.is_file():
        found = _azure("mooncake", count, scale, seed, 4.0)
        return replace(found, source=f"{MOONCAKE_FILE} not found; {found.source}")
    items: list[Item] = []
    before = seed * count
    with path.open() as lines:
        for row in map(json.loads, lines):
            prompt, output = scale.tokens(row["input_length"]), scale.tokens(row["output_length"])
            if prompt + output <= shape.window_tokens and row["output_length"]:
                if before:
                    before -= 1
                    continue
                pieces = tuple(row["hash_ids"][: prompt // prefix_tokens])
                keys = [piece * per_piece + at for piece in pieces for at in range(per_piece)]
                items.append(Item(prompt, output, shape.window_tokens - prompt, pieces, tuple(keys)))
            if len(items) == count:
                break
    if len(items) < count:
        raise SystemExit(f"{path} has {len(items)} requests that fit from number {seed * count}, {count} are wanted")
    mean = sum(item.output_tokens for item in items) / count
    items = [replace(item, max_tokens=min(item.max_tokens, round(4 * mean))) for item in items]
    items = [replace(item, output_tokens=min(item.output_tokens, item.max_tokens)) for item in items]
    source = f"{count} requests of {MOONCAKE_FILE} that fit the window from number {seed * count}"
    source = f"{source}, times {scale.factor:g}"
    return Workload("mooncake", items, shape, source, prefix_tokens=prefix_tokens)


def limit32k(count: int, scale: Scale, seed: int) -> Workload:
    """Return requests that may use 32K tokens and use 4K: no `max_tokens` to speak of, short prompts, long outputs."""
    rng = random.Random(seed)
    scale = replace(scale, factor=scale.factor / 4) if scale.factor < 1 else scale
    shape = scale.shape(32768)
    items = []
    for _ in range(count):
        prompt = lognormal(rng, scale.tokens(1024), 0.8, 1, shape.window_tokens // 4)
        output = lognormal(rng, scale.tokens(3072), 0.8, 1, shape.window_tokens // 2)
        items.append(Item(prompt, output, shape.window_tokens - prompt))
    return Workload("limit32k-use4k", items, shape, "log-normal lengths, mean 1024+3072 of 32768 tokens, scaled")


def near_critical(count: int, scale: Scale, seed: int) -> Workload:
    """Return long outputs, arriving nearly as fast as pushing everything completes them."""
    rng = random.Random(seed)
    scale = replace(scale, factor=scale.factor / 4) if scale.factor < 1 else scale
    shape = scale.shape(16384)
    items = []
    for _ in range(count):
        prompt = lognormal(rng, scale.tokens(1024), 0.3, 1, scale.tokens(4096))
        output = lognormal(rng, scale.tokens(5120), 0.5, 1, scale.tokens(12288))
        items.append(Item(prompt, output, scale.tokens(12288)))
    gaps = tuple(rng.expovariate(1.0) for _ in items)
    source = "log-normal lengths, mean 1024+5120 tokens, scaled; Poisson arrivals at 0.95 of what pushing completes"
    return Workload("near-critical", items, shape, source, 0.95, gaps)


def bimodal(count: int, scale: Scale, seed: int) -> Workload:
    """Return one long request among fifty short ones."""
    rng = random.Random(seed)
    shape = scale.shape(8192)
    items = []
    for index in range(count):
        long = index % 51 == 25
        prompt = lognormal(rng, scale.tokens(2048 if long else 256), 0.3, 1, scale.tokens(3072))
        output = lognormal(rng, scale.tokens(4096 if long else 128), 0.2, 1, scale.tokens(5120))
        items.append(Item(prompt, output, scale.tokens(5120)))
    return Workload("bimodal", items, shape, "one of 2048+4096 tokens to fifty of 256+128, log-normal, scaled")


def shared_prompt(count: int, scale: Scale, seed: int) -> Workload:
    """Return requests that all begin with one system prompt, eight times as long as what is their own."""
    rng = random.Random(seed)
    shape = replace(scale.shape(8192), prefix_caching=True)
    system_tokens = scale.tokens(2048)
    keys = tuple(range(system_tokens // shape.block_size))
    items = []
    for _ in range(count):
        # vLLM computes a prompt's last token again, so each has at least a block of its own.
        own = lognormal(rng, scale.tokens(256), 0.5, shape.block_size + 1, scale.tokens(2048))
        output = lognormal(rng, scale.tokens(256), 0.8, 1, scale.tokens(1024))
        items.append(Item(system_tokens + own, output, scale.tokens(1024), (0,), keys))
    source = "2048 tokens of one system prompt and 256+256 of their own, log-normal, scaled"
    return Workload("shared-prompt", items, shape, source, prefix_tokens=system_tokens)


def fixed_output(count: int, scale: Scale, seed: int) -> Workload:
    """Return requests whose outputs are all as long as they may be: benchmarks that ignore the end token send such."""
    rng = random.Random(seed)
    shape = scale.shape(8192)
    most = scale.tokens(512)
    items = [Item(lognormal(rng, scale.tokens(512), 0.5, 1, scale.tokens(4096)), most, most) for _ in range(count)]
    return Workload("fixed-output", items, shape, "512 tokens of prompt, log-normal, all outputs 512, scaled")


def noisy(workload: Workload, sigma: float, seed: int) -> Workload:
    """Return the requests with texts that differ in their bytes per token, log-normal with this deviation."""
    rng = random.Random(f"{seed} bytes")
    mu = math.log(BYTES_PER_TOKEN) - sigma * sigma / 2
    items = [replace(item, bytes_per_token=rng.lognormvariate(mu, sigma)) for item in workload.items]
    return replace(workload, items=items)


def lognormal(rng: random.Random, mean: float, sigma: float, least: int, most: int) -> int:
    """Draw a whole number with this mean before it is clipped."""
    return min(max(round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), least), most)


WORKLOADS: dict[str, Callable[[int, Scale, int], Workload]] = {
    "kv-bound": kv_bound,
    "azure": azure,
    "mooncake": mooncake,
    "limit32k-use4k": limit32k,
    "near-critical": near_critical,
    "bimodal": bimodal,
    "loose-max-tokens": loose_max_tokens,
    "shared-prompt": shared_prompt,
    "fixed-output": fixed_output,
}
"""Every workload by name; the first is the acceptance workload."""


def of_seeds(name: str, count: int, scale: Scale, seeds: Iterable[int]) -> dict[int, Workload]:
    """Return each seed's requests of a workload; raises SystemExit naming it if its trace has not so many."""
    try:
        return {seed: WORKLOADS[name](count, scale, seed) for seed in seeds}
    except SystemExit as error:
        raise SystemExit(f"{name}: {error}; ask for fewer, or leave {name} out of --workload") from None


def make(name: str, count: int, scale: str, seed: int = 0) -> Workload:
    """Return a workload by name. Raises KeyError for unknown names."""
    return WORKLOADS[name](count, SCALES[scale], seed)
