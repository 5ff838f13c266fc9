"""How many blocks a tokenized request needs, and whether it can run here at all."""

from __future__ import annotations

from typing import NamedTuple

from services.core.value import Value
from services.worker.core.messages import Ending, EndingKind


class Sizes(NamedTuple):
    """What bounds a request on this worker."""

    capacity_blocks: int
    """Blocks that may be booked: usable engine blocks less the watermark."""
    blocks_total: int
    """Usable engine blocks."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Window in tokens, prompt and output together."""
    lookahead_tokens: int = 0
    """Tokens that a sequence may have slots for beyond those it has returned."""
    default_max_tokens: int | None = None
    """Output tokens of a request that asks for no number; None means up to the window."""
    ceiling_max_tokens: int | None = None
    """Most output tokens any request may ask for; None means the window."""
    most_blocks: int = 0
    """Blocks that one completion holds at most, whatever its length; 0 means that its length alone says so."""


class Need(Value):
    """What a request takes at its peak."""

    def __init__(self, blocks: int, max_tokens: int) -> None:
        self.blocks = blocks
        """Over all completions."""
        self.max_tokens = max_tokens
        """Output tokens per completion."""


def need_blocks(sizes: Sizes, prompt_tokens: int, max_tokens: int, completions: int) -> int:
    """Return the blocks held at the peak.

    The KV of the last sampled token is never written, so a completion peaks one
    token below its length; tokens computed ahead of the output count as well, as
    far as there is room for them.
    """
    peak_tokens = min(prompt_tokens + max_tokens, sizes.max_model_len) - 1 + sizes.lookahead_tokens
    blocks = max(1, -(-peak_tokens // sizes.block_size))
    return completions * min(blocks, sizes.most_blocks or blocks)


def covered_tokens(sizes: Sizes, prompt_tokens: int, held_blocks: int, completions: int) -> int:
    """Return the output tokens per completion that need no more than `held_blocks` in all."""
    blocks = held_blocks // completions
    if sizes.most_blocks and blocks >= sizes.most_blocks:
        return sizes.max_model_len - prompt_tokens
    return blocks * sizes.block_size + 1 - sizes.lookahead_tokens - prompt_tokens


def output_tokens(room: int, asked: int, default: int | None, ceiling: int | None) -> int:
    """Return the output tokens per completion where there is `room` for so many; `asked` is 0 where nobody has."""
    return min(asked or default or room, room, ceiling or room)


def size(sizes: Sizes, prompt_tokens: int, max_tokens: int, completions: int) -> Need | Ending:
    """Return the need of a request, or the rejection of one that can never run here.

    `max_tokens` 0 means the default of the model, else up to the window.
    """
    room = sizes.max_model_len - prompt_tokens
    if room < 1:
        return Ending(
            EndingKind.REJECTED,
            "context_length_exceeded",
            # As vLLM begins: clients know it by these words.
            f"This model's maximum context length is {sizes.max_model_len} tokens. However, the prompt has "
            f"{prompt_tokens} tokens, which leaves none for the output.",
            "prompt",
        )
    most = output_tokens(room, max_tokens, sizes.default_max_tokens, sizes.ceiling_max_tokens)
    blocks = need_blocks(sizes, prompt_tokens, most, completions)
    if blocks > sizes.capacity_blocks:
        return Ending(
            EndingKind.REJECTED,
            "pool_too_small",
            f"the request needs {blocks} blocks at its peak ({prompt_tokens} prompt and {most} output tokens, "
            f"{completions} completions), the worker's pool has {sizes.capacity_blocks}",
            "max_tokens",
        )
    return Need(blocks, most)
