"""The configuration file: what it overrides, what overrides it, and how wrong lines are told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli import run_batch
from penstock.cli.config import defaults_of
from penstock.cli.errors import CommandError
from penstock.cli.main import app
from penstock.config_file import ConfigFile, ConfigFileError, client_table, positions
from penstock.exits import EX_CONFIG
from penstock.tls import TlsFiles
from services.config import ServiceSettings, default_channels
from services.config_check import KINDS, check, show
from services.config_reading import SettingsRefusedError, load_settings, read_settings
from services.config_source import Environment
from services.gateway.settings import GatewaySettings
from services.queue.settings import QueueSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings, flags_of, load_arguments

ROOT = Path(__file__).resolve().parents[3]

GOOD = """\
[common]
log_level = "debug"

[[channels]]
name = "chat"
weight = 3

[[channels]]
name = "files"
guaranteed_share = 0.25

[queue]
default_channel = "chat"
lease_s = 90
log_level = "error"

[worker.engine_arguments]
max-model-len = 4096
"""


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(GOOD)
    return path


def refused(kind: type[QueueSettings | SchedulerSettings | WorkerSettings], path: Path, text: str) -> list[str]:
    """Return what is said about a file, without its directory."""
    path.write_text(text)
    with pytest.raises(SettingsRefusedError) as error:
        read_settings(kind, ["--config", str(path)])
    return [line.removeprefix(f"{path.parent}/") for line in error.value.lines]


# ---- what overrides what ----


def test_flag_environment_file_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    settings, record = read_settings(QueueSettings, [])
    assert (settings.lease_s, settings.log_level, settings.max_attempts) == (90.0, "error", 3)
    assert {name: channel.weight for name, channel in settings.channels.items()} == {"chat": 3.0, "files": 1.0}
    assert record.origin("lease_s") == f"{file}:14"
    assert record.origin("max_attempts") == "default"
    assert read_settings(SchedulerSettings, []).settings.log_level == "debug"
    monkeypatch.setenv("PENSTOCK_QUEUE_LEASE_S", "70")
    settings, record = read_settings(QueueSettings, [])
    assert (settings.lease_s, record.origin("lease_s")) == (70.0, "PENSTOCK_QUEUE_LEASE_S")
    settings, record = read_settings(QueueSettings, ["--lease-s", "50"])
    assert (settings.lease_s, record.origin("lease_s")) == (50.0, "flag")


def test_channels_of_two_sources_are_not_mixed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CHANNELS", '{"chat": {"tier": 1}, "other": {}}')
    settings = read_settings(QueueSettings, ["--config", str(file)]).settings
    assert set(settings.channels) == {"chat", "other"}
    assert settings.channels["chat"].weight == 1
    flags = ["--config", str(file), "--channels", '{"chat": {}}']
    assert set(read_settings(QueueSettings, flags).settings.channels) == {"chat"}


def test_a_variable_may_name_a_file_with_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("debug\n")
    monkeypatch.setenv("PENSTOCK_QUEUE_LOG_LEVEL_FILE", str(secret))
    assert read_settings(QueueSettings, []).settings.log_level == "debug"
    monkeypatch.setenv("PENSTOCK_QUEUE_LOG_LEVEL", "info")
    with pytest.raises(SettingsRefusedError, match="both set"):
        read_settings(QueueSettings, [])
    monkeypatch.delenv("PENSTOCK_QUEUE_LOG_LEVEL")
    secret.unlink()
    with pytest.raises(SettingsRefusedError, match=r"PENSTOCK_QUEUE_LOG_LEVEL_FILE: .*secret"):
        read_settings(QueueSettings, [])


def test_engine_arguments_of_the_file_come_before_those_of_the_command_line(file: Path) -> None:
    arguments = ["--config", str(file), "--engine", "simulated", "--max-model-len", "128"]
    assert load_arguments(arguments).engine_arguments == ["--max-model-len", "4096", "--max-model-len", "128"]
    told = {"enforce_eager": True, "async-scheduling": False, "names": ["a", "b"], "config": {"x": 1}}
    assert flags_of(told) == ["--enforce-eager", "--no-async-scheduling", "--names", "a", "b", "--config", '{"x": 1}']


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n[queu]\n", "penstock.toml:2: queu: unknown; did you mean queue?"),
        ("[queue]\n\nlisen = ''\n", "penstock.toml:3: queue.lisen: unknown; did you mean listen?"),
        ("[common]\nmetrics_listen = ':1'\n", "penstock.toml:2: common.metrics_listen: unknown; known: "),
        ("queue = 3\n", "penstock.toml:1: queue: must be a table: write [queue]"),
        ("[queue]\nlease_s = 'long'\n", "penstock.toml:2: queue.lease_s: Input should be a valid number"),
        (
            "[queue]\nlease_s = 0\n",
            "penstock.toml:2: queue.lease_s: Input should be greater than or equal to 1 (got 0)",
        ),
        ("[common]\nlog_level = 'loud'\n", "penstock.toml:2: common.log_level: String should match"),
        ("[queue]\na = [\n", "penstock.toml:2: Invalid value"),
        ("[queue]\na = " + "[" * 5000, "penstock.toml: nested too deeply"),
        ("[queue]\nlease_s = {a" + ".a" * 5000 + " = 1}\n", "penstock.toml:2: queue.lease_s: Input should be"),
        ("[queue]\nlease_s = " + "1" * 5000 + "\n", "penstock.toml: Exceeds the limit"),
        ("[queue]\nlease_s = inf\n", "penstock.toml:2: queue.lease_s: Input should be a finite number"),
        ("[[channels]]\nname = 'a'\nweight = inf\n", "penstock.toml:3: channels[0].weight: Input should be a finite"),
        ("[[channels]]\nname = 'a'\nweight = 1e-9\n", "penstock.toml:3: channels[0].weight: Input should be greater"),
        ("[queue]\nlease_s = true\n", "penstock.toml:2: queue.lease_s: must be a number, not true or false (got True)"),
        ("[[channels]]\nname = 'a'\ntier = true\n", "penstock.toml:3: channels[0].tier: must be a number, not true"),
        ("[queue]\n\n[queue]\n", "penstock.toml:3: "),
        ("[channels]\nweight = 1\n", "penstock.toml:1: channels: write [[channels]] before each channel"),
        ("[[channels]]\nweight = 1\n", "penstock.toml:1: channels[0]: a channel needs a name"),
        ("[[channels]]\nname = 'a'\n[[channels]]\nname = 'a'\n", "penstock.toml:4: channels[1].name: there is a"),
        (
            "[[channels]]\nname = 'a'\nwaight = 1\n",
            "penstock.toml:3: channels[0].waight: unknown; did you mean weight?",
        ),
        (
            "[[channels]]\nname = 'a'\n[[channels]]\nname = 'b'\ntier = 99\n",
            "penstock.toml:5: channels[1].tier: Input should be less than or equal to 15 (got 99)",
        ),
        (
            "[[channels]]\nname = 'a'\nguaranteed_share = 0.6\n[[channels]]\nname = 'b'\nguaranteed_share = 0.6\n",
            "penstock.toml:1: channels: guaranteed_share adds up to 1.200",
        ),
        ("[queue]\nchannels = {a = {}}\n", "penstock.toml:2: queue.channels: write [[channels]]"),
        ("[queue]\ndefault_channel = 'x'\n", "penstock.toml:2: queue.default_channel: 'x' is not one of"),
    ],
)
def test_a_wrong_line_is_told_with_file_line_and_nearest_name(tmp_path: Path, text: str, said: str) -> None:
    (line,) = refused(QueueSettings, tmp_path / "penstock.toml", text)
    assert line.startswith(said)


def test_a_service_judges_its_own_table_alone(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    refused(QueueSettings, path, "[queue]\nwrong = 1\n")
    read_settings(SchedulerSettings, ["--config", str(path)])


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="No such file"):
        ConfigFile.read(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigFileError, match="Is a directory"):
        ConfigFile.read(str(tmp_path))
    path = tmp_path / "x.toml"
    path.write_bytes(b"[queue]\n\xff\n")
    with pytest.raises(ConfigFileError, match=r"x\.toml:2: not UTF-8"):
        ConfigFile.read(str(path))
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigFileError, match="larger than"):
        ConfigFile.read(str(path))


names = st.sampled_from(["a", "b", "c-d", '"e f"', "'g.h'"])


@given(st.lists(st.tuples(st.sampled_from(["", "#x", "table", "array", "key", "dotted"]), names, names), max_size=12))
def test_every_value_has_its_line(steps: list[tuple[str, str, str]]) -> None:
    """Write a file line by line, ask tomllib what it reads, and find each value on the line that wrote it."""
    import tomllib

    forms = {"table": "[{0}.t]", "array": "[[{0}.l]]", "key": "{0} = {n}", "dotted": "{0}.{1} = {n}"}
    text = ""
    for number, (form, one, two) in enumerate(steps, 1):
        line = forms.get(form, form).format(one, two, n=number)
        try:
            tomllib.loads(text + line + "\n")
            text += line + "\n"
        except tomllib.TOMLDecodeError:
            text += "\n"
    found = positions(text)

    def look(value: object, path: tuple[str | int, ...]) -> None:
        if isinstance(value, int):
            assert found[path] == value
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [])
        ):
            look(inner, (*path, key))

    look(tomllib.loads(text), ())


# ---- the example ----


def test_the_example_says_the_defaults(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "penstock.toml").read_text()
    path = tmp_path / "all.toml"
    path.write_text(re.sub(r"^# ([a-z][a-z_-]* = )", r"\1", text, flags=re.MULTILINE))
    for name, kind in KINDS.items():
        plain = read_settings(kind, []).settings.model_dump(exclude={"config", "engine_arguments"})
        for file in (ROOT / "deploy" / "penstock.toml", path):
            read = read_settings(kind, ["--config", str(file)]).settings
            assert read.model_dump(exclude={"config", "engine_arguments"}) == plain, name
    assert set(ConfigFile.read(str(path)).table("worker")) == set(WorkerSettings.model_fields) - {
        "config", "insecure", "key", "log_format", "log_level", "reflection", "shutdown_grace_s",
        "tls_ca", "tls_cert", "tls_client_auth", "tls_key",
    }  # fmt: skip
    assert set(default_channels()) == {"interactive", "batch"}


# ---- the environment ----


def test_variables_of_a_service_that_are_no_settings_are_refused_each_with_what_was_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_QUEUE_LISTN", "127.0.0.1:0")
    monkeypatch.setenv("PENSTOCK_QUEUE_ZZZ_FILE", "x")
    with pytest.raises(SettingsRefusedError) as refusal:
        read_settings(QueueSettings, [])
    first, second = refusal.value.lines
    assert first == "PENSTOCK_QUEUE_LISTN: unknown; did you mean PENSTOCK_QUEUE_LISTEN?"
    assert second.startswith("PENSTOCK_QUEUE_ZZZ_FILE: unknown; known: PENSTOCK_CHANNELS, PENSTOCK_CONFIG,")
    with pytest.raises(SystemExit) as ending:
        load_settings(QueueSettings, "penstock queue", [])
    assert ending.value.code == EX_CONFIG


def test_a_setting_that_is_named_alike_for_all_services_is_meant_by_a_service_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_QUEUE_CHANNELS", "{}")
    with pytest.raises(SettingsRefusedError) as refusal:
        read_settings(QueueSettings, [])
    assert refusal.value.lines == ["PENSTOCK_QUEUE_CHANNELS: unknown; did you mean PENSTOCK_CHANNELS?"]


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").glob("compose*.yaml")), ids=lambda path: path.name)
@pytest.mark.parametrize("kind", [QueueSettings, SchedulerSettings, WorkerSettings, GatewaySettings])
def test_services_start_where_compose_has_its_variables(
    kind: type[ServiceSettings], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set(re.findall(r"\$\{(PENSTOCK_\w+)", file.read_text()))
    assert names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert Environment(kind)._unknown() == []


@pytest.mark.parametrize(
    "name",
    [
        "PENSTOCK_QUEUE_PORT",
        "PENSTOCK_QUEUE_SERVICE_HOST",
        "PENSTOCK_QUEUE_SERVICE_PORT_GRPC",
        "PENSTOCK_QUEUE_PORT_7410_TCP_ADDR",
        "PENSTOCK_QUEUE_HEADLESS_SERVICE_PORT",
        "PENSTOCK_QUEUE",
        "PENSTOCK_SCHEDULER_LISTN",
    ],
)
def test_variables_of_kubernetes_and_of_others_are_none_of_its_business(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:7410")
    assert read_settings(QueueSettings, []).settings == QueueSettings()


# ---- secrets ----


class Guarded(QueueSettings):
    """A service with a secret."""

    token: SecretStr = Field(SecretStr(""), min_length=8, description="A secret.")


def test_a_secret_is_read_from_a_file_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("hush-hush\n")
    monkeypatch.setenv("PENSTOCK_QUEUE_TOKEN_FILE", str(tmp_path / "token"))
    settings = read_settings(Guarded, []).settings
    assert settings.token.get_secret_value() == "hush-hush"
    monkeypatch.setitem(KINDS, "queue", Guarded)
    assert show("queue", []) == 0
    (tmp_path / "token").write_text("hush")
    assert show("queue", []) == 78
    monkeypatch.delenv("PENSTOCK_QUEUE_TOKEN_FILE")
    (line,) = refused(Guarded, tmp_path / "penstock.toml", "[queue]\ntoken = 'hush'\n")
    assert line.startswith("penstock.toml:2: queue.token: Value should have at least 8 items")
    (tmp_path / "w.toml").write_text(
        "[worker.engine_arguments]\nhf-token = 'hush'\nmax-num-batched-tokens = 512\n"
        """loader = {uri = "u", more = [{s3_secret_access_key = "hush"}]}\nas-text = '{"api_key": "hush", "b": 1}'\n"""
    )
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "w.toml"))
    assert show("worker", []) == 0
    said = capsys.readouterr()
    assert "max-num-batched-tokens: 512" in said.out
    assert "'uri': 'u', 'more': [{'s3_secret_access_key': '********'}]" in said.out
    assert 'as-text: {"api_key": "********", "b": 1}' in said.out
    assert re.search(r"^token +\*{8} +PENSTOCK_QUEUE_TOKEN_FILE$", said.out, re.MULTILINE)
    assert "hush" not in said.out + said.err + line


# ---- penstock config ----


def test_a_name_that_is_unknown_is_refused_also_where_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text("[queue]\nwrong = 1\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    with pytest.raises(ConfigFileError, match=r"queue\.wrong: unknown"):
        QueueSettings()


def test_check_and_show_as_commands(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(str(file)) == 0
    assert f"{file}: good" in capsys.readouterr().out
    assert show("queue", ["--config", str(file), "--lease-s", "7"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^lease_s +7.0 +flag$", shown, re.MULTILINE)
    assert re.search(rf"^default_channel +chat +{file}:13$", shown, re.MULTILINE)
    file.write_text("[queue]\nlease_s = 0\n")
    assert check(str(file)) == show("queue", ["--config", str(file)]) == 78
    assert ":2: queue.lease_s" in capsys.readouterr().err


def test_the_command_ends_with_the_status_of_the_check(file: Path) -> None:
    file.write_text("[nonsense]\n")
    environment = os.environ | {"PENSTOCK_CONFIG": str(file)}
    command = [sys.executable, "-m", "penstock", "config", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert f"{file}:1: nonsense: unknown" in done.stderr


# ---- [client] ----


def test_commands_take_addresses_and_tls_from_the_file(file: Path) -> None:
    file.write_text('[common]\ntls_ca = "ca.pem"\n[client]\nqueue = "q:1"\n')
    environment = {"PENSTOCK_CONFIG": str(file)}
    assert defaults_of(get_command(app), environment)["get"] == {"queue": "q:1"}
    assert TlsFiles.from_environment(environment) == TlsFiles("ca.pem", "", "")
    assert TlsFiles.from_environment(environment | {"PENSTOCK_TLS_CA": "other"}) == TlsFiles("other", "", "")
    file.write_text('[common]\ntls_ca = "ca.pem"\n[client]\ntls_ca = "mine.pem"\n')
    assert TlsFiles.from_environment(environment).ca == "mine.pem"
    assert client_table({}) == {}
    for table in ("common", "client"):
        file.write_text(f'[{table}]\ntls_ca = "a\\u0000b"\n')
        with pytest.raises(ConfigFileError, match=rf"penstock\.toml:2: {table}\.tls_ca: must not have a NUL character"):
            client_table(environment)
    file.write_text("[client]\nqueue = 7410\n")
    with pytest.raises(CommandError, match=r"penstock\.toml:2: client\.queue: must be a string"):
        defaults_of(get_command(app), environment)


def test_a_file_named_by_the_option_tells_addresses_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(run_batch, "_with_journal", lambda options, _: asked.append((options.queue, options.scheduler)))
    file.write_text('[client]\nqueue = "file:1"\n')
    elsewhere = {"run-batch": {"queue": "elsewhere:1", "scheduler": "elsewhere:2"}}
    command = ["run-batch", "-i", str(file), "-o", str(file.with_name("out"))]
    for flags, queue in (([], "elsewhere:1"), (["--config", str(file)], "file:1")):
        monkeypatch.setenv("PENSTOCK_CONFIG", "")
        for flag in ([], ["--queue", "flag:1"]):
            CliRunner().invoke(app, [*command, *flag, *flags], default_map=elsewhere, catch_exceptions=False)
            assert asked.pop() == ("flag:1" if flag else queue, "127.0.0.1:7420" if flags else "elsewhere:2")
    monkeypatch.setenv("PENSTOCK_QUEUE", "variable:1")
    CliRunner().invoke(app, [*command, "--config", str(file)], catch_exceptions=False)
    assert asked.pop()[0] == "variable:1"


def test_the_gateway_passes_over_what_all_are_told_of_grpc_alone(file: Path) -> None:
    """It has no reflection to serve, and `[common]` is for all services."""
    file.write_text("[common]\nreflection = true\n[gateway]\nconsole = false\n")
    for kind in (QueueSettings, SchedulerSettings, WorkerSettings):
        assert read_settings(kind, ["--config", str(file)]).settings.reflection
    assert not read_settings(GatewaySettings, ["--config", str(file)]).settings.console
    assert "reflection" not in GatewaySettings.model_fields
    file.write_text("[gateway]\nreflection = true\n")
    with pytest.raises(SettingsRefusedError, match=r"penstock\.toml:2: gateway\.reflection: unknown"):
        read_settings(GatewaySettings, ["--config", str(file)])
    with pytest.raises(SettingsRefusedError, match="--reflection: unknown"):
        read_settings(GatewaySettings, ["--reflection"])


def test_the_gateway_reads_its_table(file: Path) -> None:
    file.write_text('[gateway]\nconsole_hosts = ["a"]\nconsole = false\n')
    settings = read_settings(GatewaySettings, ["--config", str(file)]).settings
    assert (settings.console_hosts, settings.console) == (["a"], False)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_bytes(b"\xef\xbb\xbf[queue]\nlease_s = 0\n")
    file = ConfigFile.read(str(path))
    assert file.table("queue") == {"lease_s": 0}
    assert str(file.error(("queue", "lease_s"), "wrong")) == f"{path}:2: queue.lease_s: wrong"
