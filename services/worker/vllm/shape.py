"""What a sequence holds in vLLM's cache beside the blocks of its own tokens, as the ledger's rule counts it.

The rule is that of `need_blocks`: a sequence peaks at its tokens less one, and the lookahead, rounded up to blocks, or
at the most that one can hold.
"""

from __future__ import annotations

from typing import Any


def lookahead_tokens(config: Any) -> int:
    """Return for how many tokens a sequence may have slots beyond those that it has returned.

    It has them for the tokens drafted for it, which the model is to look at, and for what the drafter writes behind
    them (`num_lookahead_tokens`: a draft model and EAGLE have a cache of their own in the same blocks). Where the next
    step is scheduled while one runs, that one's token and drafts come on top: whether they are kept is not known yet.
    """
    drafted: int = config.num_speculative_tokens
    ahead: int = drafted + config.num_lookahead_tokens
    if config.scheduler_config.async_scheduling:
        ahead += 1 + drafted
    return ahead


def state_blocks(config: Any) -> int:
    """Return the blocks that a sequence takes beside those of its tokens, however long it is.

    Layers with a state (Mamba, linear attention, short convolutions) beside layers with attention have block tables of
    their own, which do not grow with the sequence. How many blocks these are is what a whole window takes beyond its
    tokens: to be asked when the engine has started, which is when vLLM says how many windows fit. Tables that do grow
    (sliding windows beside all that) are counted as long as they get: too much is booked then, and never too little.
    """
    if not config.model_config.is_hybrid:
        return 0
    return max(0, blocks_of_a_window(config) - window_blocks(config))


def most_blocks(config: Any) -> int:
    """Return the blocks that a sequence holds at most, however long it is: slots end at the window, drafts or none.

    Where all layers slide alike vLLM keeps what they can see, and what it computes in a step, and gives back the rest;
    that is fewer blocks than a window has, and so is what vLLM takes a whole window to need. What is ahead of the
    output may come on top of that.
    """
    window: int = window_blocks(config)
    if config.model_config.is_hybrid:
        return window + state_blocks(config)
    if not config.cache_config.kv_cache_max_concurrency:
        return window
    ahead: int = -(-lookahead_tokens(config) // config.cache_config.block_size)
    return min(window, blocks_of_a_window(config) + ahead)


def window_blocks(config: Any) -> int:
    """Return the blocks that have as many tokens as a window."""
    tokens, block_size = config.model_config.max_model_len, config.cache_config.block_size
    blocks: int = -(-tokens // block_size)
    return blocks


def blocks_of_a_window(config: Any) -> int:
    """Return the blocks that a whole window takes by vLLM's figure of how many fit."""
    cache = config.cache_config
    blocks: int = round(cache.num_gpu_blocks / cache.kv_cache_max_concurrency)
    return blocks
