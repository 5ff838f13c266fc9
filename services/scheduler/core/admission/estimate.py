"""How many blocks a request may need: what is proven before its prompt is tokenized.

A request peaks at `min(prompt + output, max_model_len) - 1` tokens (the KV of
the last token is never written), plus what the engine may run ahead of its
output, and never more blocks than its worker says. Each of its `n` completions is counted with a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.core.messages import Announced, EngineShape, RejectRequest

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
POOL_TOO_SMALL = "pool_too_small"
REJECTIONS = (CONTEXT_LENGTH_EXCEEDED, POOL_TOO_SMALL)
"""Codes of what no worker could ever hold."""

BEYOND_ANY_BLOCKS = 1 << 62
"""What a request needs whose prompt alone exceeds the window."""


def need_blocks(tokens: int, block_size: int) -> int:
    """Return the blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def sequence_blocks(tokens: int, shape: EngineShape) -> int:
    """Return the blocks that one completion holds at its peak, prompt and output being so many tokens together."""
    blocks = max(need_blocks(tokens - 1 + shape.lookahead_tokens, shape.block_size), 1)
    return min(blocks, shape.most_blocks or blocks)


def asked_tokens(request: Announced, shape: EngineShape) -> int:
    """Return the output tokens of one completion that are asked for, by the request or in its place by the model."""
    return request.max_tokens or shape.default_max_tokens or shape.max_model_len


def output_tokens(request: Announced, shape: EngineShape) -> int:
    """Return the most output tokens of one completion."""
    window = shape.max_model_len
    ceiling = min(shape.ceiling_max_tokens or window, window)  # of three at once it would be a call into Python
    return min(asked_tokens(request, shape), ceiling)


def prompt_bound_tokens(request: Announced, shape: EngineShape) -> int:
    """Return a number of tokens the prompt cannot exceed if the request can run at all.

    Exact for token ids; bytes plus special tokens for plain text under a tokenizer
    proven to make no more tokens than bytes; else whatever the output leaves of the window: what
    `max_tokens` asks for is kept free, and one token where it asks for no number.
    """
    if request.prompt_tokens:
        return request.prompt_tokens
    if shape.byte_bounded_tokenizer and not request.chat and request.prompt_bytes:
        return request.prompt_bytes + shape.special_tokens
    return max(shape.max_model_len - max(request.max_tokens, 1), 1)


def peak_blocks(prompt_tokens: int, output: int, request: Announced, shape: EngineShape) -> int:
    """Return the blocks that all completions hold at their peak, for prompt and output of so many tokens each."""
    return max(request.n, 1) * sequence_blocks(min(prompt_tokens + output, shape.max_model_len), shape)


def worst_case_blocks(request: Announced, shape: EngineShape) -> int:
    """Return the blocks the request can need at most, whatever its prompt turns out to be.

    The bound of a prompt that nobody has counted is what the tokens asked for leave of the window, so it is these that
    go with it, also above the ceiling: a longer prompt has the rest of the window for its output.
    """
    return peak_blocks(prompt_bound_tokens(request, shape), asked_tokens(request, shape), request, shape)


def window_blocks(request: Announced, shape: EngineShape) -> int:
    """Return the blocks of the model's whole window for each completion."""
    return peak_blocks(shape.max_model_len, 0, request, shape)


def least_blocks(request: Announced, shape: EngineShape) -> int:
    """Return the blocks the request is proven to need at least: its prompt has one token or the number known."""
    return peak_blocks(max(request.prompt_tokens, 1), output_tokens(request, shape), request, shape)


def needed_blocks(request: Announced, shape: EngineShape) -> int:
    """Return the blocks an engine must have to hold the request, by what is proven of its size; no engine has
    BEYOND_ANY_BLOCKS."""
    return least_blocks(request, shape) if request.prompt_tokens < shape.max_model_len else BEYOND_ANY_BLOCKS


def could_hold(request: Announced, shape: EngineShape) -> bool:
    """Return whether an idle engine of this shape could hold the request, by what is proven of its size."""
    return needed_blocks(request, shape) <= shape.capacity_blocks


def rejection(request: Announced, shapes: Sequence[EngineShape]) -> RejectRequest | None:
    """Return why none of the engines that serve the request's model could ever hold it, with both numbers.

    None if one could, or if there is none to ask.
    """
    if not shapes or any(could_hold(request, shape) for shape in shapes):
        return None
    window_tokens = max(shape.max_model_len for shape in shapes)
    if request.prompt_tokens >= window_tokens:
        return RejectRequest(
            request.request_id,
            CONTEXT_LENGTH_EXCEEDED,
            # As vLLM begins: clients know it by these words.
            f"This model's maximum context length is {window_tokens} tokens. However, the prompt has "
            f"{request.prompt_tokens} tokens, which leaves none for the output.",
            "prompt",
            request.traceparent,
        )
    largest = max(shapes, key=lambda shape: shape.capacity_blocks)
    return RejectRequest(
        request.request_id,
        POOL_TOO_SMALL,
        f"the request needs at least {least_blocks(request, largest)} KV-cache blocks;"
        f" the largest worker has {largest.capacity_blocks}",
        "sampling.n" if request.n > 1 else "prompt",
        request.traceparent,
    )
