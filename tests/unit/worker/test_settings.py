"""Which arguments are the worker's and which the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.settings import load_arguments, split_arguments
from services.worker.simulated.profile import PROFILES
from services.worker.simulated.settings import simulated_settings


def test_what_the_worker_does_not_know_goes_to_the_engine_in_order() -> None:
    ours, engines = split_arguments(
        ["--model", "m", "--max-model-len", "2048", "--listen=:1", "--enforce-eager", "--dtype=float32", "--seed", "-1"]
    )
    assert ours == ["--model", "m", "--listen", ":1"]
    assert engines == ["--max-model-len", "2048", "--enforce-eager", "--dtype=float32", "--seed", "-1"]


def test_a_switch_of_the_worker_is_its_own_with_or_without_a_value() -> None:
    for switch, wanted in (
        ([], False),
        (["--trust-request-chat-template"], True),
        (["--no-trust-request-chat-template"], False),
    ):
        settings, engines, _ = load_arguments(["--model", "m", *switch, "--enforce-eager"])
        assert (settings.trust_request_chat_template, engines) == (wanted, ["--enforce-eager"])


def test_a_parser_of_calls_may_be_named_with_the_switch_that_vllms_server_wants_beside_it() -> None:
    for arguments in (
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        ["--tool-call-parser", "hermes", "--enable_auto_tool_choice"],
        ["--tool-call-parser=hermes"],
    ):
        settings, engines, _ = load_arguments(["--model", "m", *arguments, "--enforce-eager"])
        assert (settings.tool_call_parser, engines) == ("hermes", ["--enforce-eager"])


def test_served_names_are_read_as_vllm_reads_them() -> None:
    wanted = ("a", "b", "c")
    for arguments in (
        ["--served-model-name", "a", "b", "c", "--enforce-eager"],
        ["--served-model-name", "a", "--served-model-name=b", "--served_model_name", "c", "--enforce-eager"],
    ):
        settings, engines, _ = load_arguments(["--model", "m", *arguments])
        assert settings.names() == wanted
        assert engines == ["--enforce-eager"]


def test_the_model_is_served_under_its_own_name_by_default() -> None:
    assert load_arguments(["--model", "org/name"]).settings.names() == ("org/name",)


def test_the_worker_is_named_after_host_and_port() -> None:
    assert load_arguments(["--model", "m", "--listen", "127.0.0.1:7431"]).settings.the_worker_id().endswith("-7431")
    assert load_arguments(["--model", "m", "--worker-id", "w"]).settings.the_worker_id() == "w"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model is required"),
        (["--model", "m", "--watermark-blocks", "-1"], "--watermark-blocks: "),
        (["--model", "m", "--listen", "nonsense"], "--listen: "),
        (["--engine", "other"], "--engine: "),
        (["--model", "m", "--port=80"], "--port is a flag of vLLM's HTTP server; in its place: --base-port"),
        (
            ["--model", "m", "--max-num-queued-reqs=8"],
            "--max-num-queued-reqs turns away what was accepted; in its place:",
        ),
        (["--model", "m", "--tokenizer-processes", "0"], "--tokenizer-processes: "),
        (
            ["--model", "m", "--enable-auto-tool-choice"],
            "--enable-auto-tool-choice: requires --tool-call-parser (worker.tool_call_parser)",
        ),
    ],
)
def test_wrong_settings_exit_78_and_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_arguments(arguments)
    assert ended.value.code == 78
    assert said in capsys.readouterr().err


def test_where_an_argument_of_the_engine_was_given_is_known(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[worker.engine_arguments]\nmax_model_len = 20\nzork = 3\nenforce-eager = false\n")
    given = load_arguments(["--config", str(file), "--model", "m", "--max-model-len", "many", "--bork"])
    for text, line in (
        ("unrecognized arguments: --zork 3", 3),
        ("unrecognized arguments: --bork --zork 3", 3),
        ("unrecognized arguments: --no-enforce-eager", 4),
    ):
        name = "enforce-eager" if line == 4 else "zork"
        assert given.with_place(text) == f"{file}:{line}: worker.engine_arguments.{name}: {text}"
    for text in ("argument --max-model-len: invalid int value: 'many'", "unrecognized arguments: --bork", "what"):
        assert given.with_place(text) == text


def test_where_an_argument_of_the_engine_was_given_may_be_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_ENGINE_ARGUMENTS", '{"zork": 3}')
    said = load_arguments(["--model", "m"]).with_place("unrecognized arguments: --zork 3")
    assert said == "PENSTOCK_WORKER_ENGINE_ARGUMENTS.zork: unrecognized arguments: --zork 3"


def test_a_setting_of_the_worker_among_its_engines_arguments_is_told_where_it_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[worker.engine_arguments]\ntool-call-parser = 'hermes'\nreasoning-parser = 'qwen3'\nport = 1\n")
    with pytest.raises(SystemExit) as ended:
        load_arguments(["--config", str(file), "--model", "m"])
    assert ended.value.code == 78
    belongs, other = capsys.readouterr().err.splitlines()
    where = f"penstock worker: {file}:2: worker.engine_arguments.tool-call-parser"
    assert belongs == f"{where}: is a setting of the worker, not of its engine: tool_call_parser in [worker]"
    assert other.startswith(f"penstock worker: {file}:4: worker.engine_arguments.port: is a flag of vLLM's HTTP server")


def test_vllms_own_admission_in_the_file_is_told_where_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[worker.engine_arguments]\nmax_num_queued_tokens = 256\n")
    with pytest.raises(SystemExit) as ended:
        load_arguments(["--config", str(file), "--model", "m"])
    assert ended.value.code == 78
    where = f"penstock worker: {file}:2: worker.engine_arguments.max_num_queued_tokens"
    assert capsys.readouterr().err.startswith(f"{where}: turns away what was accepted; in its place: ")


def test_the_environment_is_a_source_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_QUEUE_ADDRESS", "elsewhere:1")
    assert load_arguments(["--model", "m"]).settings.queue_address == "elsewhere:1"


def test_the_simulated_engine_takes_vllms_names() -> None:
    made = simulated_settings("m", (), ["--num-gpu-blocks-override", "65", "--max-num-seqs", "4"])
    assert (made.num_blocks, made.max_num_seqs) == (64, 4)


def test_the_simulated_engine_takes_vllms_scheduler_rules() -> None:
    rules = simulated_settings("m", (), []).rules
    assert (rules.watermark, rules.scheduler_reserve_full_isl, rules.enable_prefix_caching) == (0, True, True)
    flags = ["--watermark", "0.1", "--no-scheduler-reserve-full-isl", "--no-enable-prefix-caching"]
    rules = simulated_settings("m", (), [*flags, "--long-prefill-token-threshold", "64"]).rules
    assert rules == (0.1, 64, False, False, "priority")
    assert simulated_settings("m", (), ["--scheduling-policy", "fcfs"]).rules.scheduling_policy == "fcfs"


def test_a_gpu_profile_brings_its_blocks() -> None:
    blocks = PROFILES["h100-llama-8b"].num_blocks
    assert blocks is not None
    assert simulated_settings("m", (), ["--profile", "h100-llama-8b"]).num_blocks == blocks
    assert simulated_settings("m", (), ["--profile", "h100-llama-8b", "--block-size", "32"]).num_blocks == blocks // 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "--max-num-batched-tokens"),
        (["--watermark", "1.5"], "--watermark"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--block-size=-16"], "--block-size must be at least 1"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--max-model-len", "5000000000"], "--max-model-len must be at least 1 and at most 2147483647"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--num-gpu-blocks-override", "0"], "--num-gpu-blocks-override must be at least 1"),
        (["--scheduling-policy", "sjf"], "--scheduling-policy"),
    ],
)
def test_impossible_rules_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulated_settings("m", (), flags)
    assert ended.value.code == 78
    assert said in capsys.readouterr().err
