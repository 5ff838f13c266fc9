"""vLLM's scheduler with two rules more: one for what is within a guarantee, one for what comes together.

The watermark keeps nobody waiting who is within a guarantee. It (`ENGINE_WATERMARK`) leaves blocks free for those that
run to grow into, and if blocks are missed later, it is others that are preempted. Priority scheduling alone puts such
a request first in the engine's line, where it would wait until more than the watermark is free; in a cache of two
dozen long outputs that takes seconds, as each that is preempted leaves less than that.

No two requests come at one time. By priority vLLM preempts whoever came last, and of those that came together the
first: the completions of one request have one time, and the one that has got furthest would be thrown out for the
others, over and over. So each is taken to have come just after the one before it, as it entered the engine. That also
keeps the order where a clock has been set back.

Importing this imports vLLM's scheduler.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def _passing(allocate_slots: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `allocate_slots` without a watermark for whoever has a priority above the usual."""

    def allocate(request: Any, *args: Any, has_scheduled_reqs: bool = True, **kwargs: Any) -> Any:
        # vLLM applies the watermark if others are scheduled.
        watermark = has_scheduled_reqs and request.priority >= 0
        return allocate_slots(request, *args, has_scheduled_reqs=watermark, **kwargs)

    return allocate


class GuaranteedPass(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with both rules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's scheduler; the engine core does."""
        super().__init__(*args, **kwargs)
        self.kv_cache_manager.allocate_slots = _passing(self.kv_cache_manager.allocate_slots)
        self._latest_s = 0.0

    def add_request(self, request: Any) -> None:
        """Take a request in, as having come after all before it; the engine core does."""
        request.arrival_time = max(request.arrival_time, math.nextafter(self._latest_s, math.inf))
        self._latest_s = request.arrival_time
        super().add_request(request)


class GuaranteedPassAsync(GuaranteedPass, AsyncScheduler):  # type: ignore[misc]
    """The same for a scheduler that is a step ahead of the model."""


PASSING: Final = {Scheduler: GuaranteedPass, AsyncScheduler: GuaranteedPassAsync}


def let_guaranteed_pass(config: Any) -> None:
    """Have the engine of `config` follow the rules if it schedules by priority, with a scheduler that is known here.

    Any other keeps its own rules; what is guaranteed is first in its line all the same.
    """
    scheduling = config.scheduler_config
    known = (
        scheduling.scheduler_cls is None
        and "has_scheduled_reqs" in inspect.signature(KVCacheManager.allocate_slots).parameters
    )
    if scheduling.policy == "priority" and known:
        scheduling.scheduler_cls = PASSING.get(scheduling.get_scheduler_cls())


def goes_by_priority(config: Any) -> bool:
    """Return whether the engine of `config` runs requests by priority: its scheduler is vLLM's, or a kind of it."""
    scheduling = config.scheduler_config
    return scheduling.policy == "priority" and issubclass(scheduling.get_scheduler_cls(), Scheduler)


def _is_of_another(record: logging.LogRecord) -> bool:
    """Return whether a log record is not vLLM's warning of a scheduler that is not its own, and ours.

    Ours is held to vLLM's, step by step, at the version that is pinned (tests/integration/test_engine_replay.py).
    """
    ours = isinstance(record.args, tuple) and any(kind in PASSING.values() for kind in record.args)
    return not (ours and str(record.msg).startswith("Using custom scheduler class"))


logging.getLogger("vllm.config.scheduler").addFilter(_is_of_another)
