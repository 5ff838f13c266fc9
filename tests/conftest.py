"""Settings of all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

import penstock.cli  # noqa: F401 (first, so that the tests' own clients have gRPC as a command has it: it forks)

NAMED = os.environ.get("GRPC_EXPERIMENTS")

import services  # noqa: E402, F401
from tests.support.effort import LONG  # noqa: E402

if NAMED is None:
    # The services that tests start choose for themselves.
    del os.environ["GRPC_EXPERIMENTS"]

# For every engine that tests start: on cores that others want as well, threads that spin until the last of them had its
# turn cost many times what they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests share two cores with real services: how long an example takes says nothing about the code.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what collecting makes: all of it stays, and would be looked through each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests marked `long` to the targets that ask for them, and of those marked `grid` half of the cases."""
    cases: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("grid") is not None and item.get_closest_marker("long") is None:
            test = item.nodeid.partition("[")[0]
            # Of two that are beside each other in one parameter alone, one and the other in turn.
            if cases[test].bit_count() % 2:
                item.add_marker(pytest.mark.long)
            cases[test] += 1
        if not LONG and item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.skip(reason="`make test-long` runs it"))


TOGETHER = {
    "what asks one fleet of real vLLM": (
        "integration/test_bad_input.py", "integration/test_gateway_vllm.py", "integration/test_parity.py",
        "integration/test_resume.py",
    ),
    "what imports vLLM": (
        "contract/worker/", "integration/test_engine_replay.py", "unit/batch/test_answers.py",
        "unit/benchmarks/test_force_length", "unit/openai/test_bodies.py", "unit/openai/test_chunks.py",
        "unit/openai/test_logprobs.py",
    ),
}  # fmt: skip
"""Files for one process of two: fleet, engine and import take longer to start than most tests."""


class Together(LoadFileScheduling):  # type: ignore[misc]
    """A file goes to one process as a whole, and so do those of TOGETHER."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((what for what, files in TOGETHER.items() if any(name in file for name in files)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together | None:
    """Hand out files as they are collected: those at the end are many and short, so that both cores end as one."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Together(config, log)
