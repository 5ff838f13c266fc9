"""What the worker tells vLLM that its user did not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from services.worker.engine import ENGINE_WATERMARK
from tests.support.fleet import penstock


@pytest.mark.vllm
def test_newcomers_leave_growth_its_blocks_unless_told_otherwise() -> None:
    from services.worker.vllm_engine import parse_engine_arguments

    assert parse_engine_arguments(["--model", "m"], True).watermark == ENGINE_WATERMARK > 0
    assert parse_engine_arguments(["--model", "m"], True).disable_hybrid_kv_cache_manager is True
    assert parse_engine_arguments(["--model", "m", "--watermark", "0"], True).watermark == 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0.1"], True).watermark == 0.1


@pytest.mark.vllm
@pytest.mark.parametrize(("trusts", "is_fast"), [(True, True), (False, False)])
def test_clients_templates_and_slow_tokenizers_are_kept_off_the_workers_own_thread(trusts: bool, is_fast: bool) -> None:
    from services.worker.vllm_engine import Prepared, VllmEngine

    engine = SimpleNamespace(vllm_renderer=SimpleNamespace(tokenizer=SimpleNamespace(is_fast=is_fast)))
    prepared = Prepared(SimpleNamespace(model_config=None), ("tiny",), True, "", trusts)
    assert prepared.make_renderer_of(cast(VllmEngine, engine)) is None


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watermark", "5"], "watermark: Input should be less than 1"),
        (["--block-size", "0"], "block_size: Input should be greater than 0"),
        (["--max-model-len", "99999"], "User-specified max_model_len (99999) is greater than"),
        (["--reasoning-parser", "nope"], "Reasoning parser 'nope' not found"),
        (["--runner", "pooling"], "--runner pooling: only models that generate are served"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init: prompts are counted"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_the_reason_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    from services.worker.vllm_engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert penstock("tiny-model", str(tmp_path / "tiny")).returncode == 0
    with pytest.raises(SystemExit) as ending:
        prepare(str(tmp_path / "tiny"), ("tiny",), ["--dtype", "float32", "--enforce-eager", *arguments])
    assert ending.value.code == 78
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("worker: ")]
    assert [line.partition(said)[:2] for line in lines] == [("worker: the engine's arguments do not fit: ", said)]
