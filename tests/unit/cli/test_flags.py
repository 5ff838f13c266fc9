"""What commands say of flags that do nothing, and what is pasted of what they print."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.errors import CommandError
from penstock.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", "hi", "--stream", "--json"), "for JSON use --wait"),
        (("run-batch", "-i", "in", "-o", "out", "--workers", "2"), "--workers needs --up"),
        (("run-batch", "-i", "in", "-o", "out", "--data-dir", "d"), "--data-dir needs --up"),
    ],
)
def test_a_flag_without_effect_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("option", ["-i", "-o", "--summary-json"])
@pytest.mark.parametrize("url", ["https://example.org/in.jsonl", "s3://bucket/in.jsonl", "file:///in.jsonl"])
def test_a_url_is_no_file(option: str, url: str) -> None:
    options = {"-i": "in", "-o": "out", option: url}
    arguments = ["run-batch", *(text for pair in options.items() for text in pair)]
    with pytest.raises(CommandError, match=f"^{url}: is a URL; run-batch reads and writes files"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_what_certs_prints_can_be_pasted(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["certs", str(tmp_path / "my certs")])
    clients = ran.stdout.partition("# for their clients:\n")[2].replace("# export", "export")
    for text, name in ((ran.stdout, "service"), (clients, "client")):
        shell = [
            "env",
            "-i",
            "sh",
            "-c",
            f'{text}\nprintf "%s\\n" "$PENSTOCK_TLS_CA" "$PENSTOCK_TLS_CERT" "$PENSTOCK_TLS_KEY"',
        ]
        told = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [Path(path).name for path in told] == ["ca.pem", f"{name}.pem", f"{name}-key.pem"]
        assert all(Path(path).is_file() for path in told)


@pytest.mark.parametrize("host", ["bad host", "", "https://here", "here:7410", "é.example"])
def test_a_certificate_is_made_for_no_host_that_there_cannot_be(host: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"--host: .* is no host name or IP address") as refused:
        CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), "--host", host], catch_exceptions=False)
    assert (refused.value.status, list(tmp_path.iterdir())) == (2, [])


def test_a_certificate_is_made_for_names_and_addresses(tmp_path: Path) -> None:
    hosts = [
        word
        for host in ("queue-0.penstock.svc", "*.example.org", "my_host", "::1", "10.0.0.5")
        for word in ("--host", host)
    ]
    assert CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), *hosts]).exit_code == 0


def commands(group: typer.Typer, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of the group itself and of every command below it."""
    yield path
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance, *path, str(below.name))


@pytest.mark.parametrize("words", [*commands(app)], ids=" ".join)
def test_a_terminal_of_80_columns_shows_every_flag_whole(words: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert told.exit_code == 0
    assert "--help" in told.stdout
    assert [line for line in told.stdout.splitlines() if "…" in line] == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--modle", "--model"), ("--wrokers=2", "--workers"), ("--modell", "--model"), ("--data_dir", "--data-dir")],
)
def test_a_misspelt_flag_of_the_commands_own_is_not_left_to_the_engine(typed: str, meant: str, tmp_path: Path) -> None:
    # What is not caught ends at a directory that is none, and starts nothing.
    for name in ("in", "no directory"):
        (tmp_path / name).touch()
    directory = ["--data-dir", str(tmp_path / "no directory")]
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    for command in (["up", *directory], ["run-batch", "--up", *files, *directory]):
        with pytest.raises(CommandError, match=f"unknown flag {typed}; did you mean {meant}\\?"):
            CliRunner().invoke(app, [*command, typed, "x"], catch_exceptions=False)
