"""How many blocks the running requests of vLLM hold together, by its prefix cache.

vLLM tells how many blocks are taken, and not by how many requests each. What each would hold on its own follows from
its tokens; what they would hold in all, less what is taken, they share. vLLM's front-end keeps the tokens in records
that are no public interface: where they do not look as expected, nothing is said to be shared.
"""

from __future__ import annotations

from typing import Any

from services.worker.vllm.shape import most_blocks, window_blocks


class Sharing:
    """Counts what is held together, and never too much.

    Who had no token in the latest step is left out: a prompt that is being computed, and whoever was preempted. Their
    blocks are among those that are taken all the same.
    """

    def __init__(self, config: Any, processor: Any) -> None:
        """Read the records of vLLM's `processor` of outputs. `config` is that of an engine that has started."""
        self._states: Any = getattr(processor, "request_states", None)
        self._block_size: int = config.cache_config.block_size
        # Where blocks come free while a request runs, or some do not follow its tokens, they are not known by these.
        by_tokens = not config.model_config.is_hybrid and most_blocks(config) == window_blocks(config)
        self._counts = bool(by_tokens and config.cache_config.enable_prefix_caching and self._states is not None)
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
        return max(self._held() - taken, 0) if self._found else 0

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
