"""What the worker tells vLLM that its user did not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from services.worker.engine import ENGINE_WATERMARK


@pytest.mark.vllm
def test_newcomers_leave_growth_its_blocks_unless_told_otherwise() -> None:
    from services.worker.vllm_engine import parse_engine_arguments

    assert parse_engine_arguments(["--model", "m"], True).watermark == ENGINE_WATERMARK > 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0"], True).watermark == 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0.1"], True).watermark == 0.1


@pytest.mark.vllm
@pytest.mark.parametrize(("trusts", "is_fast"), [(True, True), (False, False)])
def test_clients_templates_and_slow_tokenizers_are_kept_off_the_workers_own_thread(trusts: bool, is_fast: bool) -> None:
    from services.worker.vllm_engine import Prepared, VllmEngine

    engine = SimpleNamespace(vllm_renderer=SimpleNamespace(tokenizer=SimpleNamespace(is_fast=is_fast)))
    prepared = Prepared(SimpleNamespace(model_config=None), ("tiny",), True, "", trusts)
    assert prepared.make_renderer_of(cast(VllmEngine, engine)) is None
