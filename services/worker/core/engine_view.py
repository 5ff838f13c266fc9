"""The engine as the scheduler is told of it: what changed, and when to say so."""

from __future__ import annotations

from services.worker.core.messages import EngineReported, SendReport


class EngineView:
    """Newest stats of the engine, with the integrals over time that reports carry.

    vLLM reports after a step. Blocks that come free outside a step (an abort, a
    stop string) are in no report until the next step; until then the free
    blocks are unknown, or all of them if nothing is left in the engine, and
    nobody is said to share any: they may have been those of who has gone.
    """

    def __init__(self, blocks_total: int) -> None:
        """Start with an idle engine of `blocks_total` usable blocks."""
        self._blocks_total = blocks_total
        self._stats = EngineReported(blocks_total, 0, 0, 0, 0, 0.0)
        self._freed_since = False
        self._since_ns: int | None = None
        self._usage_ns = 0.0
        self._busy_ns = 0
        self._told: tuple[int | None, int, int, int, int] | None = None
        self._told_ns = 0

    @property
    def stats(self) -> EngineReported:
        """Newest stats."""
        return self._stats

    def reported(self, stats: EngineReported, now_ns: int) -> None:
        """Take the stats of a step."""
        self._integrate(now_ns)
        self._stats = stats
        self._freed_since = False

    def freed_outside_step(self) -> None:
        """Note that blocks came free which no report shows yet."""
        self._freed_since = True

    def emptied(self, now_ns: int) -> None:
        """Note that nothing is left in the engine: every block is free."""
        self._integrate(now_ns)
        last = self._stats
        self._stats = EngineReported(
            self._blocks_total, 0, 0, last.preemptions, last.step_ns, 0.0, last.prefill_ns, last.prefill_tokens
        )
        self._freed_since = False

    def forget_told(self) -> None:
        """Forget what was told: the listener is a new one."""
        self._told = None

    @property
    def changed(self) -> bool:
        """Whether the listener's picture is out of date."""
        return self._told != self._picture()

    def due_ns(self, interval_ns: int) -> int:
        """Return the earliest time of the next report."""
        return self._told_ns + interval_ns if self._told is not None else 0

    def report(self, epoch: int, now_ns: int) -> SendReport:
        """Return the report to send at `now_ns` and remember that it was told."""
        self._integrate(now_ns)
        self._told = self._picture()
        self._told_ns = now_ns
        stats = self._stats
        return SendReport(
            epoch=epoch,
            blocks_free=self._told[0],
            running=stats.running,
            waiting=stats.waiting,
            preemptions=stats.preemptions,
            step_ns=stats.step_ns,
            kv_cache_usage=stats.kv_cache_usage,
            kv_cache_usage_ns=self._usage_ns,
            busy_ns=self._busy_ns,
            prefill_ns=stats.prefill_ns,
            prefill_tokens=stats.prefill_tokens,
            blocks_shared=self._told[-1],
        )

    def _picture(self) -> tuple[int | None, int, int, int, int]:
        stats = self._stats
        free, shared = (None, 0) if self._freed_since else (stats.blocks_free, stats.blocks_shared)
        return free, stats.running, stats.waiting, stats.preemptions, shared

    def _integrate(self, now_ns: int) -> None:
        if self._since_ns is not None:
            passed_ns = now_ns - self._since_ns
            self._usage_ns += passed_ns * self._stats.kv_cache_usage
            self._busy_ns += passed_ns if self._stats.running else 0
        self._since_ns = now_ns
