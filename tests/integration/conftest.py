"""Fleets of real processes, shared where a test leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, penstock
from tests.support.vllm_server import vllm_server

ENGINE_FLAGS = [
    "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
    "--block-size", "32", "--num-gpu-blocks-override", "129",
]  # fmt: skip
"""One small engine: 128 usable blocks of 32 tokens, eight whole windows."""

TOOL_PARSER = ["--tool-call-parser", "hermes"]
"""Of the fleet and of the server that tests compare; both say the same without it where no tools are offered."""

SIMULATED_FLAGS = ["--engine", "simulated", "--served-model-name", "tiny"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    made = penstock("tiny-model", str(directory))
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture(scope="session")
def engine_flags(tiny_model: Path) -> list[str]:
    return ["--model", str(tiny_model), *ENGINE_FLAGS]


@pytest.fixture(scope="session")
def vllm_fleet(tmp_path_factory: pytest.TempPathFactory, engine_flags: list[str]) -> Iterator[Fleet]:
    """Queue, scheduler and one real vLLM worker for the tests that do not kill any of them."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start_core()
        fleet.add_worker("w1", [*engine_flags, *TOOL_PARSER])
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="session")
def vllm_reference(tmp_path_factory: pytest.TempPathFactory, engine_flags: list[str]) -> Iterator[str]:
    """Base address of vLLM's own server, for the same model and engine settings."""
    flags = [*engine_flags, *TOOL_PARSER, "--enable-auto-tool-choice"]
    with vllm_server(flags, tmp_path_factory.mktemp("serve") / "serve.log") as base:
        yield base


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Return a maker of fleets with queue and scheduler running; all end with the test."""
    fleets: list[Fleet] = []

    def make(**options: object) -> Fleet:
        fleet = Fleet(tmp_path / f"fleet-{len(fleets)}", **options)  # type: ignore[arg-type]
        fleets.append(fleet)
        fleet.start_core()
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()
