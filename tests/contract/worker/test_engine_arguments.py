"""What the worker tells vLLM that its user did not."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from penstock.server_flags import ADMISSION, IN_PLACE
from services.config_check import _is_secret
from services.worker.engine import ENGINE_SCHEDULING, ENGINE_WATERMARK
from services.worker.settings import SHORT_OPTIONS, Arguments, WorkerSettings
from services.worker.vllm.checks import Parsers
from tests.support.fleet import penstock


@pytest.mark.vllm
def test_newcomers_leave_growth_its_blocks_unless_told_otherwise() -> None:
    from services.worker.vllm.arguments import parse_engine_arguments

    assert parse_engine_arguments(["--model", "m"], True).watermark == ENGINE_WATERMARK > 0
    assert parse_engine_arguments(["--model", "m"], True).disable_hybrid_kv_cache_manager is True
    assert parse_engine_arguments(["--model", "m", "--watermark", "0"], True).watermark == 0
    assert parse_engine_arguments(["--model", "m", "--watermark", "0.1"], True).watermark == 0.1
    assert parse_engine_arguments(["--model", "m"], True).scheduling_policy == ENGINE_SCHEDULING
    asked = parse_engine_arguments(["--model", "m", "--scheduling-policy", "fcfs"], True)
    assert asked.scheduling_policy == "fcfs"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ranks", "given", "binding"),
    [("1", {}, None), ("999", {}, "nobind"), ("999", {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, "0|1")],
)
def test_more_ranks_than_memory_nodes_are_bound_to_none(ranks: str, given: dict[str, str], binding: str | None) -> None:
    from services.worker.vllm.arguments import parse_engine_arguments

    with patch.dict(os.environ):
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        os.environ |= given
        parse_engine_arguments(["--model", "m", "--tensor-parallel-size", ranks], True)
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == binding


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("policy", "ahead", "asked", "used"),
    [
        ("priority", False, None, "GuaranteedPass"),
        ("priority", True, None, "GuaranteedPassAsync"),
        ("priority", False, "other.Scheduler", "other.Scheduler"),
        ("fcfs", False, None, None),
    ],
)
def test_vllms_own_schedulers_alone_let_what_is_guaranteed_pass(
    policy: str, ahead: bool, asked: str | None, used: str | None
) -> None:
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from services.worker.vllm.scheduling import let_guaranteed_pass

    made = SchedulerConfig.default_factory(policy=policy, scheduler_cls=asked, async_scheduling=ahead)
    let_guaranteed_pass(SimpleNamespace(scheduler_config=made))
    assert getattr(made.scheduler_cls, "__name__", made.scheduler_cls) == used
    assert asked or issubclass(made.get_scheduler_cls(), AsyncScheduler) is ahead


@pytest.mark.vllm
def test_a_scheduler_of_somebody_elses_is_warned_of_and_not_relied_on(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config import SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    from services.worker.vllm.scheduling import goes_by_priority, let_guaranteed_pass

    class OfVllms(Scheduler):  # type: ignore[misc]
        """Keeps its order."""

    class Other:
        """Keeps an order of its own."""

    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.WARNING, "vllm")  # another test may have had vLLM imported as one that only tells errors
    for asked, known, warned in ((None, True, False), (OfVllms, True, True), (Other, False, True)):
        made = SimpleNamespace(scheduler_config=SchedulerConfig.default_factory(policy="priority"))
        made.scheduler_config.scheduler_cls = asked
        let_guaranteed_pass(made)
        caplog.clear()
        assert goes_by_priority(made) is known
        assert ("Using custom scheduler class" in caplog.text) is warned


@pytest.mark.vllm
@pytest.mark.parametrize(("trusts", "is_fast"), [(True, True), (False, False)])
def test_clients_templates_and_slow_tokenizers_are_kept_off_the_workers_own_thread(trusts: bool, is_fast: bool) -> None:
    from services.worker.vllm.engine import Prepared, VllmEngine
    from services.worker.vllm.templates import ChatDefaults

    engine = SimpleNamespace(vllm_renderer=SimpleNamespace(tokenizer=SimpleNamespace(is_fast=is_fast)))
    prepared = Prepared(SimpleNamespace(model_config=None), ("tiny",), True, Parsers(), trusts, {}, ChatDefaults())
    assert prepared.make_renderer_of(cast(VllmEngine, engine)) is None


@pytest.mark.vllm
@pytest.mark.grid
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watermark", "5"], "watermark: Input should be less than 1"),
        (["--block-size", "0"], "block_size: Input should be greater than 0"),
        (["--max-model-len", "99999"], "User-specified max_model_len (99999) is greater than"),
        (["--reasoning-parser-plugin", "/x.py"], "--reasoning-parser-plugin: parsers are vLLM's own"),
        (["--reasoning-parser", "kimi_k3"], "--reasoning-parser: what gpt-oss and Kimi-K3 think"),
        (["--runner", "pooling"], "--runner pooling: only models that generate text are served"),
        (["--data-parallel-size", "2"], "--data-parallel-size 2: each of its engines has a cache of its own"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size: vLLM on a CPU fails with it"),
        (["--chat-template", "/none.jinja"], "--chat-template: The supplied chat template (/none.jinja) looks like"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs: [1] is no JSON object"),
        (["--default-chat-template-kwargs", '{"tokenize": true}'], "--default-chat-template-kwargs: tokenize is no"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init: prompts are counted"),
        (["--max-num-queued-reqs", "0"], "--max-num-queued-reqs turns away what was accepted; in its place: nothing"),
        (["--max-num-queued-tokens", "256"], "--max-num-queued-tokens turns away what was accepted; in its place: "),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_the_reason_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    from services.worker.vllm.engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert penstock("tiny-model", str(tmp_path / "tiny")).returncode == 0
    with pytest.raises(SystemExit) as ending:
        prepare(str(tmp_path / "tiny"), ("tiny",), ["--dtype", "float32", "--enforce-eager", *arguments])
    assert ending.value.code == 78
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock worker: ")]
    assert [line.partition(said)[:2] for line in lines] == [
        ("penstock worker: the engine's arguments do not fit: ", said)
    ]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "tools", "said"),
    [
        (["--reasoning-parser", "nope"], "", "--reasoning-parser: vLLM has no parser called 'nope'"),
        (["--structured-outputs-config.reasoning_parser", "nope"], "hermes", "--reasoning-parser: vLLM has no parser"),
        (["--reasoning-parser", "qwen3"], "nope", "--tool-call-parser: vLLM has no parser called 'nope'"),
        (["--reasoning-parser", "hf"], "hermes", "--tool-call-parser, --reasoning-parser: The hf parser cannot be"),
    ],
)
def test_a_parser_that_vllm_does_not_have_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tools: str, said: str
) -> None:
    from services.worker.vllm.engine import prepare

    with pytest.raises(SystemExit) as ending:
        prepare("org/name", ("tiny",), arguments, tools)
    assert ending.value.code == 78
    assert capsys.readouterr().err.startswith(f"penstock worker: {said}")


@pytest.mark.vllm
@pytest.mark.parametrize(
    "arguments",
    [
        ["--reasoning-parser", "qwen3"],
        ["--structured-outputs-config.reasoning_parser", "qwen3"],
        ["--structured-outputs-config", '{"reasoning_parser": "qwen3"}'],
    ],
)
def test_a_reasoning_parser_may_be_named_in_either_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """The engine is told of it as well: structured outputs begin where the reasoning ends."""
    from services.worker.vllm.engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert penstock("tiny-model", str(tmp_path / "tiny")).returncode == 0
    prepared = prepare(str(tmp_path / "tiny"), ("tiny",), ["--dtype", "float32", *arguments], "hermes")
    assert prepared._parsers == Parsers("hermes", "qwen3")
    assert prepared._config.structured_outputs_config.reasoning_parser == "qwen3"


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_local_experts": 2,
    "num_experts_per_tok": 1, "vocab_size": 256, "max_position_embeddings": 1024, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.vllm
def test_of_the_flags_that_are_refused_by_name_those_of_admission_alone_are_the_engines() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def options(parser: Any) -> set[str]:
        return {option.removeprefix("--") for action in parser._actions for option in action.option_strings}

    engines = options(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False)))
    assert set(IN_PLACE) <= options(make_arg_parser(FlexibleArgumentParser(add_help=False))) - engines
    assert set(ADMISSION) == {name for name in engines if name.startswith("max-num-queued-")}


@pytest.mark.vllm
def test_an_unknown_argument_is_told_with_the_place_where_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    from services.worker.vllm.arguments import parse_engine_arguments

    for text, place in (("a.toml:3: worker.engine_arguments.zork", {"zork": "a.toml:3: worker.engine_arguments.zork"}),
                        ("engine arguments of the command line", {})):  # fmt: skip
        given = Arguments(WorkerSettings(), [], place)
        with pytest.raises(SystemExit):
            parse_engine_arguments(["--model", "m", "--zork", "3"], True, given.with_place)
        said = capsys.readouterr().err.splitlines()[-1]  # torch has a line of its own where it is imported here
        assert said == f"penstock worker: {text}: unrecognized arguments: --zork 3"
    with pytest.raises(SystemExit):
        parse_engine_arguments(["--model", "m", "--zork", "--max-modle-len", "3"], True)
    assert capsys.readouterr().err.endswith(" --max-modle-len 3; did you mean --max-model-len?\n")


@pytest.mark.vllm
def test_of_the_names_of_options_the_hubs_token_alone_is_taken_for_a_secret() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    names = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    assert len(names) > 100
    assert [name for name in names if _is_secret(name, 512)] == ["hf-token"]


@pytest.mark.vllm
def test_the_short_options_are_known_by_their_long_names() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    short = {
        option.removeprefix("-"): action.option_strings[0].removeprefix("--")
        for action in parser._actions
        for option in action.option_strings
        if not option.startswith("--")
    }
    assert short | {"O": "optimization-level"} == SHORT_OPTIONS, "-O is the parser's own"
    read = parser.parse_args(["-O3", "-n2"])
    assert (str(read.optimization_level), read.nnodes) == ("3", 2)


@pytest.mark.vllm
def test_a_model_may_have_a_reasoning_parser_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM writes it where that of the arguments would be; it is not the worker's to read with."""
    from services.worker.vllm.engine import prepare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    prepared = prepare(str(tmp_path), ("m",), ["--max-model-len", "512"])
    assert prepared._config.structured_outputs_config.reasoning_parser
    assert not prepared._parsers.reasoning
    with pytest.raises(SystemExit):
        prepare(str(tmp_path), ("m",), ["--max-model-len", "512", "--reasoning-parser", "openai_gptoss"])
