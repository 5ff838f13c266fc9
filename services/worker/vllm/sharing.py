"""How many blocks the running requests of vLLM hold together, by its prefix cache.

vLLM tells how many blocks are taken, and not by how many requests each. What each would hold on its own follows from
its tokens; what they would hold in all, less what is taken, they share. vLLM's front-end keeps the tokens in records
that are no public interface: where they do not look as expected, nothing is said to be shared.
"""

from __future__ import annotations

from typing import Any


def holds_by_tokens(model_config: Any) -> bool:
    """Return whether what a request holds follows from its tokens alone.

    Not so where layers keep a state, nor where all of them slide, for then blocks come free while it runs. Where some
    slide the cache keeps what the others see.
    """
    kinds = getattr(model_config.hf_text_config, "layer_types", None) or ()
    slides = bool(model_config.get_sliding_window()) and "full_attention" not in kinds
    return not (model_config.is_hybrid or slides)


class Sharing:
    """Counts what is held together, and never too much.

    Who had no token in the latest step is left out: a prompt that is being computed, and whoever was preempted. Their
    blocks are among those that are taken all the same. Where a step is scheduled while one runs, who is preempted for
    it has a token of the other: then nobody is said to share anything for a step.
    """

    def __init__(self, config: Any, processor: Any) -> None:
        """Read the records of vLLM's `processor` of outputs. `config` is that of an engine that has started."""
        self._states: Any = getattr(processor, "request_states", None)
        self._block_size: int = config.cache_config.block_size
        counts = holds_by_tokens(config.model_config) and config.cache_config.enable_prefix_caching
        self._counts = bool(counts and self._states is not None)
        self._found = False

    def blocks(self, taken: int, iteration_stats: Any) -> int:
        """Return by how much the blocks of those that run exceed the `taken`, after a step with these stats."""
        if not self._counts:
            return 0
        if not self._states:
            self._found = False
            return 0
        # Nobody shares before a prompt was found in the cache; then all are looked at, in a microsecond for four.
        prompts = getattr(iteration_stats, "prompt_token_stats", None)
        self._found = self._found or bool(getattr(prompts, "cached_tokens", 0))
        if not self._found or bool(getattr(iteration_stats, "num_preempted_reqs", 0)):
            return 0
        return max(self._held() - taken, 0)

    def _held(self) -> int:
        """Return the blocks of those that had a token in the latest step, each counted on its own."""
        records = [(state.stats, state.prompt_len) for state in self._states.values() if state.stats is not None]
        latest = max((stats.last_token_ts for stats, _ in records), default=0.0)
        size = self._block_size
        # The KV of the token that came last is yet to be written.
        return sum(
            -(-(prompt + stats.num_generation_tokens - 1) // size)
            for stats, prompt in records
            if stats.last_token_ts == latest and latest
        )
