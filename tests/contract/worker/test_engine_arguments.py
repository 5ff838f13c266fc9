"""What the worker tells vLLM that its user did not."""

from __future__ import annotations

import pytest

from services.worker.engine import ENGINE_WATERMARK


@pytest.mark.vllm
def test_newcomers_leave_growth_its_blocks_unless_told_otherwise() -> None:
    from services.worker.vllm_engine import parse_engine_arguments

    assert parse_engine_arguments(["--model", "m"], True).watermark == ENGINE_WATERMARK > 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0"], True).watermark == 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0.1"], True).watermark == 0.1
