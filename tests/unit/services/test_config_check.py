"""What `penstock config check` says of a file that several services read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.config_check import KINDS, MASK, findings, show
from tests.support.pipes import pipe_with


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def said_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return [line.removeprefix(f"{path}: ") for line in findings(str(path)).wrong]


def test_the_check_compares_services(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    same_port = "[queue]\nmetrics_listen = '127.0.0.1:7420'\n"
    assert said_of(path, same_port) == [
        "queue.metrics_listen (127.0.0.1:7420) and scheduler.listen (127.0.0.1:7420) are the same port"
    ]
    assert said_of(path, "[gateway]\nqueue_address = 'localhost:7411'\n") == [
        "gateway.queue_address is localhost:7411, but queue.listen is 127.0.0.1:7410"
    ]
    assert said_of(path, "[queue]\nmetrics_listen = 'localhost:7410'\n") == [
        "queue.listen (127.0.0.1:7410) and queue.metrics_listen (localhost:7410) are the same port"
    ]
    assert said_of(path, "[queue]\nmetrics_listen = '[::1]:7410'\n") == []
    elsewhere = said_of(path, "[queue]\nlisten = '10.0.0.5:7410'\ninsecure = true\n")
    assert elsewhere == [
        f"{name}.queue_address is 127.0.0.1:7410, but queue.listen is 10.0.0.5:7410"
        for name in ("scheduler", "worker", "gateway")
    ]
    for everywhere in (":7410", "[::]:7410", "0.0.0.0:7410", "queue:7410"):
        assert said_of(path, f"[queue]\nlisten = '{everywhere}'\ninsecure = true\n") == []
    assert said_of(path, "[common]\ntls_cert = '/no/cert.pem'\ntls_key = '/no/key.pem'\n") == [
        f"{path}:2: common.tls_cert: TLS file /no/cert.pem: No such file or directory"
    ]
    assert said_of(path, "[queue]\nkeys = '/no/keys.toml'\n[scheduler]\nkeys = '/no/keys.toml'\n") == [
        f"{path}:2: queue.keys: keys file /no/keys.toml: No such file or directory",
        f"{path}:4: scheduler.keys: keys file /no/keys.toml: No such file or directory",
    ]
    (wrong,) = said_of(path, "[queue]\n[gateway]\nlisten = ':7415'\n")
    assert ":3: gateway.listen: :7415 can be reached from other machines" in wrong
    (wrong,) = said_of(path, "[common]\ntls_cert = 'x.pem'\n")
    assert wrong.endswith(":2: common.tls_cert: tls_cert and tls_key are given together or not at all")
    (wrong,) = said_of(path, "[client]\nqeue = ''\n")
    assert wrong.endswith(":2: client.qeue: unknown; did you mean queue?")
    (wrong,) = said_of(path, "[common]\nlog_level = 3\n")
    assert ":2: common.log_level" in wrong


def test_files_that_are_missing_are_told_by_the_setting_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, there = tmp_path / "penstock.toml", tmp_path / "there.pem"
    there.write_text("no certificate\n")
    for text, named in (
        (f"tls_cert = '{there}'\ntls_key = '{there}.key'\n", "3: common.tls_key: TLS file "),
        (f"tls_ca = '{there}'\n", f"2: common.tls_ca: TLS file {there}: "),
        (f"tls_key = '{there}'\ntls_cert = '{there}'\n", "3: common.tls_cert: TLS files "),
    ):
        (line,) = said_of(path, f"[common]\n{text}")
        assert line.startswith(f"{path}:{named}")
    monkeypatch.setenv("PENSTOCK_KEYS", "/no/keys.toml")
    assert said_of(path, "") == ["PENSTOCK_KEYS: keys file /no/keys.toml: No such file or directory"]


def test_the_check_tells_of_everything_that_is_wrong(tmp_path: Path) -> None:
    lines = said_of(
        tmp_path / "penstock.toml",
        """[queue]
lease_s = 0
defualt_channel = 'x'
[scheduler]
queue_address = 'nohost'
[gateway]
scheduler_address = '127.0.0.1:99999'
[kueue]
[client]
queue = ''
scheduler = 3
key = 'x'
[common]
lgo_level = 'info'
""",
    )
    assert [line.removeprefix(f"{tmp_path}/penstock.toml:").partition(" (got")[0] for line in lines] == [
        "8: kueue: unknown; did you mean queue?",
        "14: common.lgo_level: unknown; did you mean log_level?",
        "3: queue.defualt_channel: unknown; did you mean default_channel?",
        "2: queue.lease_s: Input should be greater than or equal to 1",
        "5: scheduler.queue_address: 'nohost' is not HOST:PORT",
        "7: gateway.scheduler_address: port 99999 is out of range: 1 to 65535",
        "12: client.key: unknown; PENSTOCK_KEY, or the file that PENSTOCK_KEY_FILE names, holds the key of commands",
        "10: client.queue: is empty; must be HOST:PORT",
        "11: client.scheduler: must be a string",
    ]


def test_a_mistake_with_channels_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    lines = said_of(
        path,
        """[[channels]]
name = 'a'
weight = 0
[[channels]]
name = 'a'
guaranteed_share = 2
[[channels]]
tier = 99
[queue]
max_attempts = 'three'
default_chanel = 'x'
lease_s = nan
[scheduler]
policy = 'predictve'
sequence_slack = -1
channels = {}
[client]
queue = ''
""",
    )
    assert [line.removeprefix(f"{path}:").partition(" (got")[0] for line in lines] == [
        "11: queue.default_chanel: unknown; did you mean default_channel?",
        "5: channels[1].name: there is a channel 'a' already",
        "7: channels[2]: a channel needs a name",
        "3: channels[0].weight: Input should be greater than or equal to 0.001",
        "6: channels[1].guaranteed_share: Input should be less than or equal to 1",
        "8: channels[2].tier: Input should be less than or equal to 15",
        "10: queue.max_attempts: Input should be a valid integer, unable to parse string as an integer",
        "12: queue.lease_s: Input should be a finite number",
        "16: scheduler.channels: write [[channels]]: queue and scheduler share them",
        "14: scheduler.policy: no such policy; choose one of worst-case, tokenizer-ack, virtual-channels, predictive",
        "15: scheduler.sequence_slack: Input should be greater than 0",
        "18: client.queue: is empty; must be HOST:PORT",
    ]


def test_channels_or_services_that_are_no_tables_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    text = "scheduler = 3\n[channels]\nweight = 1\n[queue]\nlease_s = nan\n[gateway]\nhead_timeout_s = 0\n"
    assert [line.removeprefix(f"{path}:").partition(" (got")[0] for line in said_of(path, text)] == [
        "1: scheduler: must be a table: write [scheduler]",
        "2: channels: write [[channels]] before each channel",
        "5: queue.lease_s: Input should be a finite number",
        "7: gateway.head_timeout_s: Input should be greater than 0",
    ]


@pytest.mark.parametrize(
    "channels",
    [
        "[[channels]]\nname = 'a'\nguaranteed_share = 0.6\n[[channels]]\nname = 'a'\nguaranteed_share = 0.6\n",
        "[[channels]]\nname = 'a'\n[[channels]]\nceiling_share = 0.1\nguaranteed_share = 0.2\n",
        "[channels]\nname = 'a'\n",
        "[queue]\nchannels = {a = {}}\n",
    ],
)
def test_channels_whose_names_are_wrong_are_not_compared(tmp_path: Path, channels: str) -> None:
    text = channels + ("" if "[queue]" in channels else "[queue]\n") + "default_channel = 'b'\n"
    assert len(said_of(tmp_path / "penstock.toml", text)) == 1


def test_ports_on_machines_of_their_own_may_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[common]\ninsecure = true\n[queue]\nmetrics_listen = ':9'\n[scheduler]\nmetrics_listen = ':9'\n")
    found = findings(str(path))
    assert not found.wrong
    assert any("machines of their own" in line for line in found.odd)


def test_services_that_the_keys_would_refuse_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "penstock.toml"
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    path.write_text(f"[queue]\nkeys = '{keys}'\n[worker]\nengine = 'simulated'\n")
    (told,) = findings(str(path)).odd
    assert "scheduler, worker, gateway will be refused without PENSTOCK_KEY" in told
    monkeypatch.setenv("PENSTOCK_KEY", "psk_some.thing")
    assert not findings(str(path)).odd


VLLM_OPTIONS = (
    "dbo-decode-token-threshold", "dbo-prefill-token-threshold", "long-prefill-token-threshold",
    "long-prefill-token-threshold-adaptive", "max-num-batched-tokens", "max-num-queued-tokens",
    "max-num-scheduled-tokens", "skip-tokenizer-init", "spec-tokens", "tokenizer", "tokenizer-mode",
    "tokenizer-revision",
)  # fmt: skip
"""Those of vLLM 0.32 that have `token` or `key` in their names, but for `hf-token`."""

IN_TABLES = (
    "cache_hit_alignment_tokens", "encoder_cudagraph_token_budgets", "eos_token", "bos_token_id", "image_token_index",
    "kv_cache_size_tokens", "max_new_tokens", "max_tokens", "max_num_encoder_input_tokens", "num_experts_per_token",
    "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "returned_token_ids", "num_key_value_heads",
    "rope_kvcache_fusion_max_token_num", "special_tokens", "suffix_decoding_min_token_prob", "token_bytes",
    "tokens_only", "speculative-config.num_speculative_tokens", "keyframes",
)  # fmt: skip
"""What options like `hf-overrides` and `speculative-config` hold."""

READABLE = (*VLLM_OPTIONS, *IN_TABLES)


def shown(
    path: Path, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> str:
    """Return what `config show worker` with `flags` prints of a file with these arguments of the engine."""
    path.write_text(f"[worker]\nmodel = 'm'\n[worker.engine_arguments]\n{arguments}")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    assert show("worker", list(flags)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("engine_arguments ")]
    return line


def test_flags_of_the_engine_are_shown_over_the_file_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "max_model_len = 8192\ndtype = 'half'\nasync-scheduling = true\n"
    flags = (
        "--max-model-len",
        "20",
        "--hf_token=hush",
        "--no-async-scheduling",
        "--enforce-eager",
        "--names",
        "a",
        "b",
    )
    line = shown(tmp_path / "penstock.toml", told, monkeypatch, capsys, *flags)
    assert "8192" not in line
    assert "hush" not in line
    for said in ("max-model-len: 20", "dtype: half", "async-scheduling: False", "enforce-eager: True", "['a', 'b']"):
        assert said in line
    assert line.endswith("penstock.toml:3, flag")
    (tmp_path / "penstock.toml").write_text("")
    assert show("worker", ["--model", "m", "--max-model-len=20"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("engine_arguments ")]
    assert line.split() == ["engine_arguments", "{max-model-len:", "20}", "flag"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-tp", "2"], "{tensor-parallel-size: 2}"),
        (["-tp=2"], "{tensor-parallel-size: 2}"),
        (["-tp", "3", "--tensor_parallel_size", "2"], "{tensor-parallel-size: 2}"),
        (["-n2"], "{tensor-parallel-size: 1, nnodes: 2}"),
        (["-q", "fp8"], "{tensor-parallel-size: 1, quantization: fp8}"),
        (["-ep"], "{tensor-parallel-size: 1, enable-expert-parallel: True}"),
        (["-cc.mode=3"], "{tensor-parallel-size: 1, compilation-config.mode: 3}"),
        (["-O3"], "{tensor-parallel-size: 1, optimization-level: 3}"),
        (["-O=3"], "{tensor-parallel-size: 1, optimization-level: 3}"),
        (["-O", "3"], "{tensor-parallel-size: 1, optimization-level: 3}"),
    ],
)
def test_short_flags_of_the_engine_are_shown_under_their_long_names(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in shown(tmp_path / "penstock.toml", "tensor-parallel-size = 1\n", monkeypatch, capsys, *flags)


@pytest.mark.parametrize(
    "argument",
    [
        """lora-modules = '[{"name": "a", "api_key": "hush"}]'""",
        """kv-transfer-config = '''\n {"kv_connector_extra_config": {"token": "hush"}}'''""",
        """"model-loader-extra-config.token" = 'hush'""",
        """"loader.secrets.first" = 'hush'""",
        *(f"""loader = {{ {name} = 'hush' }}""" for name in (
            "apiKey", "APIKey", "apikey", "HF_TOKEN", "accessToken", "api_keys", "tokens", "authTokens", "passwords",
            "client-secret", "aws_secret_access_key", "credentials",
        )),
        "tokens = ['hush']",
        "api_keys = {first = 'hush'}",
        "password = 12345\nnote = 'hush'",
    ],
)  # fmt: skip
def test_a_secret_of_the_engine_is_masked_wherever_it_is(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = shown(tmp_path / "penstock.toml", argument, monkeypatch, capsys)
    assert MASK in line
    assert "12345" not in line
    assert ("hush" in line) == ("note" in argument)


def test_what_is_no_secret_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("512", "'8k'", "true"):
        arguments = "".join(f'"{name}" = {value}\n' for name in READABLE)
        assert MASK not in shown(tmp_path / "penstock.toml", arguments, monkeypatch, capsys)
    texts = [name for name in READABLE if not name.endswith("tokens")]  # of which there may be secret ones
    arguments = "".join(f"\"{name}\" = 'a text'\n" for name in [*texts, "special_tokens"])
    assert MASK not in shown(tmp_path / "penstock.toml", arguments, monkeypatch, capsys)


def test_our_own_settings_are_shown_but_for_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "hush")
    for service, kind in KINDS.items():
        assert show(service, ["--tls-cert", "/of/tls", "--tls-key", "/of/it"]) == 0
        masked = {line.split()[0] for line in capsys.readouterr().out.splitlines() if MASK in line}
        assert masked == {"key"} & set(kind.model_fields), service


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("shiny = 3", "unknown arguments for the simulated engine: --shiny 3"),
        ("max_model_len = 'many'", "argument --max-model-len: invalid int value: 'many'"),
        ("watermark = 2", "--watermark must be at least 0 and less than 1"),
    ],
)
def test_arguments_that_no_simulated_engine_takes_are_wrong(tmp_path: Path, arguments: str, said: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(f"[worker]\nengine = 'simulated'\n[worker.engine_arguments]\n{arguments}\n")
    assert findings(str(path)).wrong == [f"{path}:3: worker.engine_arguments: {said}"]


def test_a_parser_of_tool_calls_that_the_simulated_engine_has_not_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[worker]\nengine = 'simulated'\ntool_call_parser = 'hermes'\n")
    assert findings(str(path)).wrong == [f"{path}:3: worker.tool_call_parser: the simulated engine has no tool parsers"]


def test_arguments_that_are_vllms_are_said_to_be_unchecked(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[worker]\nmodel = 'm'\n[worker.engine_arguments]\nmax_model_lenn = 20\n")
    found = findings(str(path))
    assert found.wrong == []
    assert found.odd == [f"{path}: worker.engine_arguments are not checked: vLLM judges them when a worker starts"]


def test_a_choice_of_calls_that_nothing_reads_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[worker]\nmodel = 'm'\nenable_auto_tool_choice = true\n")
    said = f"{path}:3: worker.enable_auto_tool_choice: requires --tool-call-parser (worker.tool_call_parser)"
    assert findings(str(path)).wrong == [said]


def test_a_setting_of_the_worker_among_its_engines_arguments_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(
        "[worker]\nmodel = 'm'\n[worker.engine_arguments]\ndtype = 'float32'\ntool_call_parser = 'hermes'\n"
    )
    said = "worker.engine_arguments.tool_call_parser: is a setting of the worker, not of its engine"
    assert findings(str(path)).wrong == [f"{path}:5: {said}: tool_call_parser in [worker]"]


def test_what_comes_through_a_pipe_is_checked_for_every_service() -> None:
    with pipe_with("[worker]\nwatermark_blocks = -1\n[gateway]\nconsole = 7\n") as path:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "config", "check", path],
            close_fds=False,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 78
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == [f"{path}:2:", f"{path}:4:"]
