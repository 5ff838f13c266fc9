"""Settings: where they come from, and how wrong ones are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.exits import EX_CONFIG
from penstock.queue.v1 import queue_pb2
from services.config import ChannelledSettings, ServiceSettings
from services.config_reading import SettingsRefusedError, load_settings, read_settings
from services.config_source import flag_of
from services.gateway.settings import GatewaySettings
from services.queue.metrics import QueueMetrics
from services.queue.settings import QueueSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Load settings that are wrong; return what was said."""
    with pytest.raises(SystemExit) as ending:
        load_settings(ChannelledSettings, "queue", arguments)
    assert ending.value.code == EX_CONFIG
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
def test_help_names_the_service(kind: type[ServiceSettings], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        load_settings(kind, "service", ["--help"])
    assert ending.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {kind.__module__.removesuffix('.settings')} ")
    assert set(re.findall(r"^  (--[a-z0-9-]+) ", said, re.MULTILINE)) == {flag_of(name) for name in kind.model_fields}
    assert not re.search(r"--penstock", said, re.IGNORECASE)


def test_the_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CHANNELS", '{"a": {}}')
    assert set(load_settings(ChannelledSettings, "queue", []).channels) == {"a"}
    flags = ["--penstock-channels", '{"b": {"weight": 2}}']
    assert load_settings(ChannelledSettings, "queue", flags).channels["b"].weight == 2


@pytest.mark.parametrize(
    ("channels", "said"),
    [
        ('{"a": {"weight": ', "PENSTOCK_CHANNELS: not valid JSON"),
        ('{"a": {"weight": 0}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": {"weight": Infinity}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": {"weight": NaN}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": {"weight": 1e-320}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": {"weight": 1e300}}', "PENSTOCK_CHANNELS.a.weight"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": {"wait": 1}}', "PENSTOCK_CHANNELS.a.wait"),
        ("{}", "at least one channel"),
        ('{"a": {"guaranteed_share": 0.6}, "b": {"guaranteed_share": 0.6}}', "adds up to 1.2"),
        ('{"a": {"guaranteed_share": 0.5, "ceiling_share": 0.4}}', "ceiling_share is below"),
    ],
)
def test_wrong_channels_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], channels: str, said: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CHANNELS", channels)
    assert said in refused(capsys, [])


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--lease-s=x"], {}, "--lease-s: Input should be a valid number"),
        (["--lease-s=x"], {"QUEUE_LEASE_S": "3"}, "--lease-s: Input should be a valid number"),
        ([], {"QUEUE_LEASE_S": "x"}, "PENSTOCK_QUEUE_LEASE_S: Input should be a valid number"),
        ([], {"QUEUE_LEASE_S_FILE": __file__}, "PENSTOCK_QUEUE_LEASE_S_FILE: Input should be a valid number"),
        ([], {"TLS_CLIENT_AUTH": "x"}, "PENSTOCK_TLS_CLIENT_AUTH: Input should be a valid boolean"),
        (["--tls-client-auth=x"], {}, "--tls-client-auth: Input should be a valid boolean"),
        (["--channels", "{}"], {}, "--channels: at least one channel is needed"),
        (["--channels", "{}"], {"CHANNELS": '{"a": {}}'}, "--channels: at least one channel is needed"),
        (["--channels", '{"a": {"tier": 99}}'], {}, "--channels.a.tier: Input should be less than or equal to 15"),
        (["--channels", '{"a": '], {}, "--channels: not valid JSON"),
        (["--channels", "a"], {}, "--channels: not valid JSON"),
        (["--channels", '{"a": {}}'], {"CHANNELS": "x"}, "PENSTOCK_CHANNELS: not valid JSON"),
        ([], {"CHANNELS_FILE": __file__}, "PENSTOCK_CHANNELS_FILE: not valid JSON"),
        (["--default-channel", "x"], {}, "--default-channel: 'x' is not one of batch, interactive"),
        ([], {"QUEUE_DEFAULT_CHANNEL": "x"}, "PENSTOCK_QUEUE_DEFAULT_CHANNEL: 'x' is not one of batch"),
        (["--listen", ":1"], {}, "--listen: :1 can be reached from other machines"),
        ([], {"QUEUE_LISTEN": ":1"}, "PENSTOCK_QUEUE_LISTEN: :1 can be reached from other machines"),
    ],
)
def test_a_wrong_value_is_told_by_the_name_it_was_given_by(
    flags: list[str], variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(QueueSettings, flags)
    (line,) = refused.value.lines
    assert line.startswith(said)


def test_a_variable_that_is_none_hides_no_other_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_QUEUE_LISTN", "x")
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(QueueSettings, ["--lease-s=0"])
    variable, flag = refused.value.lines
    assert variable == "PENSTOCK_QUEUE_LISTN: unknown; did you mean PENSTOCK_QUEUE_LISTEN?"
    assert flag.startswith("--lease-s: ")


KNOWN = "unknown; known: --backup-dir, --channels, --config, --data-dir, "


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lease", "3"], ["--lease: unknown; did you mean --lease-s?"]),
        (["--lease=3"], ["--lease: unknown; did you mean --lease-s?"]),
        (["--lease", "-1"], ["--lease: unknown; did you mean --lease-s?"]),
        (["--lease_s", "3"], ["--lease_s: unknown; did you mean --lease-s?"]),
        (["--LISTEN", ":1"], ["--LISTEN: unknown; did you mean --listen?"]),
        (["--no-reflecton"], ["--no-reflecton: unknown; did you mean --no-reflection?"]),
        (["--penstock-tls-crt", "x"], ["--penstock-tls-crt: unknown; did you mean --tls-cert?"]),
        (["--bogus"], [f"--bogus: {KNOWN}"]),
        (["-x", "--cofig", "y"], [f"-x: {KNOWN}", "--cofig: unknown; did you mean --config?"]),
        (
            ["--lease=3", "--log-level=loud"],
            ["--lease: unknown; did you mean --lease-s?", "--log-level: String should"],
        ),
        (["word"], ["unexpected argument 'word'"]),
        (["--", "word"], ["unexpected argument 'word'"]),
        (["--lease-s"], ["--lease-s: expected one argument"]),
        (["--config"], ["--config: expected one argument"]),
        (["--help=x"], ["--help: ignored explicit argument 'x'"]),
    ],
)
def test_a_wrong_command_line_is_told_with_what_was_meant(
    flags: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(QueueSettings, flags)
    assert len(refused.value.lines) == len(said)
    for line, start in zip(refused.value.lines, said, strict=True):
        assert line.startswith(start)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
def test_flags_named_after_a_variable_work_as_well(kind: type[ServiceSettings], tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[common]\ntls_ca = 'ca.pem'\n")
    flags = ["--penstock-config", str(tmp_path / "penstock.toml"), "--penstock-key=k", "--penstock-insecure"]
    loaded = read_settings(kind, flags)
    assert (loaded.settings.tls_ca, loaded.settings.key.get_secret_value(), loaded.settings.insecure) == (
        "ca.pem",
        "k",
        True,
    )
    assert loaded.record.origin("PENSTOCK_KEY") == "flag"


def test_unknown_flags_and_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nonsense" in refused(capsys, ["--nonsense", "1"])
    assert "--log-level: " in refused(capsys, ["--log-level", "loud"])


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--reflection"], True),
        (["--penstock-reflection", "--log-level", "debug"], True),
        (["--reflection", "true"], True),
        (["--reflection=false"], False),
        (["--no-reflection"], False),
        (["--no-penstock-reflection"], False),
        (["--reflection", "--no-reflection"], False),
    ],
)
def test_a_switch_needs_no_value(flags: list[str], wanted: bool) -> None:
    assert load_settings(QueueSettings, "queue", flags).reflection is wanted


NUMBERS = [
    (kind, name)
    for kind in (QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings)
    for name, field in kind.model_fields.items()
    if field.annotation is float
]


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e300"])
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])
def test_a_number_nobody_can_count_with_is_refused_by_name(kind: type[ServiceSettings], name: str, number: str) -> None:
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(kind, [f"--{name.replace('_', '-')}={number}"])
    (line,) = refused.value.lines
    assert line.startswith(f"--{name.replace('_', '-')}: Input should be ")


@pytest.mark.parametrize("listen", ["0.0.0.0:7410", ":7410", "[::]:7410", "10.1.2.3:7410", "queue.internal:7410"])
@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_port_that_others_can_reach_needs_a_certificate_or_a_word(
    listen: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        load_settings(QueueSettings, "penstock queue", [flag, listen])
    assert ending.value.code == 78
    said = capsys.readouterr().err
    assert listen in said
    assert "PENSTOCK_INSECURE" in said
    load_settings(QueueSettings, "penstock queue", [flag, listen, "--penstock-insecure", "true"])
    load_settings(
        QueueSettings, "penstock queue", [flag, listen, "--penstock-tls-cert", "c", "--penstock-tls-key", "k"]
    )


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:7410", "[::1]:7410", "localhost:7410"])
def test_the_loopback_needs_none(listen: str) -> None:
    assert load_settings(QueueSettings, "penstock queue", ["--listen", listen]).listen == listen


@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
@pytest.mark.parametrize("name", ["listen", "metrics_listen"])
def test_a_port_that_no_machine_has_is_refused_by_name(kind: type[ServiceSettings], name: str) -> None:
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(kind, [f"--{name.replace('_', '-')}", "127.0.0.1:65536"])
    flag = f"--{name.replace('_', '-')}"
    assert refused.value.lines == [f"{flag}: port 65536 is out of range: at most 65535 (got '127.0.0.1:65536')"]
    read_settings(kind, [f"--{name.replace('_', '-')}", "127.0.0.1:65535"])


@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("::1:7410", "'::1:7410' is not HOST:PORT, IPv6 in brackets"),
        ("[::1]", "'[::1]' is not HOST:PORT, IPv6 in brackets"),
        ("127.0.0.1", "'127.0.0.1' is not HOST:PORT"),
        ("localhost:http", "'localhost:http' is not HOST:PORT"),
        ("local host:1", "'local host:1' is not HOST:PORT"),
        ("127.0.0.1:٣", "'127.0.0.1:٣' is not HOST:PORT"),
    ],
)
def test_where_nobody_can_listen_is_said_as_of_other_addresses(
    kind: type[ServiceSettings], flag: str, address: str, said: str
) -> None:
    with pytest.raises(SettingsRefusedError) as refused:
        read_settings(kind, [flag, address])
    assert refused.value.lines == [f"{flag}: {said} (got {address!r})"]


def test_only_metrics_may_be_served_nowhere() -> None:
    read_settings(QueueSettings, ["--metrics-listen="])
    with pytest.raises(SettingsRefusedError, match="--listen: is empty; must be HOST:PORT"):
        read_settings(QueueSettings, ["--listen="])


@pytest.mark.parametrize(
    ("flag", "most"), [("--max-inflight", 2**32 - 1), ("--disk-free-min-bytes", 2**63 - 1)], ids=str
)
def test_a_number_is_bounded_by_what_it_is_sent_or_shown_in(flag: str, most: int) -> None:
    settings = read_settings(QueueSettings, [flag, str(most)]).settings
    queue_pb2.WorkOpened(max_inflight=settings.max_inflight)
    QueueMetrics(CollectorRegistry()).disk_free_min.set(settings.disk_free_min_bytes)
    with pytest.raises(SettingsRefusedError, match=f"{flag}: Input should be less than or equal to {most}"):
        read_settings(QueueSettings, [flag, str(most + 1)])


@pytest.mark.parametrize("name", ["data_dir", "backup_dir", "keys", "tls_ca", "default_channel"])
def test_a_text_with_a_nul_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """Only a file can have one: the system ends arguments and variables there."""
    file = tmp_path / "penstock.toml"
    file.write_text(f'[queue]\n{name} = "a\\u0000b"\n')
    with pytest.raises(SettingsRefusedError, match=rf"penstock\.toml:2: queue\.{name}: must not have a NUL character"):
        read_settings(QueueSettings, ["--config", str(file)])


def test_a_variable_of_composes_is_passed_over_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_WORKER_ID", "w1")
    monkeypatch.setenv("PENSTOCK_WORKER_FLAGS", "")
    assert load_settings(WorkerSettings, "worker", []).worker_id != "w1"
    load_settings(QueueSettings, "queue", [])
    said = capsys.readouterr().err
    assert said == "worker: note: PENSTOCK_WORKER_ID is for Compose alone; here it is PENSTOCK_WORKER_WORKER_ID\n"
