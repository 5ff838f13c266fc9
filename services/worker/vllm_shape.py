"""What a sequence holds in vLLM's cache beside the blocks of its own tokens, as the ledger's rule counts it.

The rule is that of `need_blocks`: a sequence peaks at its tokens less one, and the lookahead, rounded up to blocks.
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
